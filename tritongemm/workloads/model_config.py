"""Reads a model's config.json, as Hugging Face's libraries write it: values by key, each of its required type.

What a model multiplies follows from its text part. Where a model has others beside it, as one that reads images, the
text part's values are nested under ``text_config``.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tritongemm.core import values as kinds
from tritongemm.core.errors import InputError
from tritongemm.core.values import FLAG, MAP, MOST, TEXT, FieldKind
from tritongemm.system import settings
from tritongemm.system.reading import RepeatedKeyError, decode, keys_once, read_bytes

FILE = "config.json"
_QUANTISED = ("quantization_config", "compression_config")
# Files of older tools beside it, which have these values where it has none, and what they leave out.
_QUANTISED_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "hf_quant_config.json": {}, "quantize_config.json": {"quant_method": "gptq"}, "quant_config.json": {},
}  # fmt: skip
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")
NESTED = "text_config"
MOST_LAYERS = 10_000  # they are looked at one by one
CAPTURE = "tritongemm capture records the sizes of such a model as it runs"
_OTHER_PARTS = ("vision_config", "audio_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Names of keys that change which products a model has; numbers of experts that a token goes to are not among them.
_CHANGES_SHAPES = re.compile(
    r"(?!.*_per_tok)(.*experts.*|.*lora_rank|.*moe_.*intermediate.*|linear_.*|mamba_.*|ssm_.*|layer_types|hybrid_.*|"
    r"index_.*|layers_block_type|.*shared_expert.*)"
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layer_types of one shape

_POSITIVE = FieldKind(f"a whole number from 1 to {MOST}", lambda v: _is_integer(v) and 1 <= v <= MOST)
_COUNT = FieldKind(f"a whole number from 0 to {MOST}", lambda v: _is_integer(v) and 0 <= v <= MOST)
_COUNTS = FieldKind("a list of whole numbers", lambda v: isinstance(v, list) and all(map(_is_integer, v)))
NAMES = FieldKind("a list of names", lambda v: isinstance(v, list) and all(map(TEXT.holds, v)))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class ModelConfig:
    """The values of a model's text part."""

    path: Path  # the file, for messages
    values: Mapping[str, Any]  # by key; null stands for a key that is missing
    top_level: Mapping[str, Any]  # the values of the file's first level
    usual: Mapping[str, Any]  # values of keys that files of such models leave out, as the model's code has them
    read: set[str] = field(default_factory=set, compare=False)  # keys that were read

    @property
    def architectures(self) -> Sequence[str]:
        """The names of the classes that can run the model."""
        names = self.top_level.get("architectures")
        self.require(NAMES, "architectures", names if names is not None else [])
        return names or []

    @property
    def dtype(self) -> str:
        """The name of the type in which the model computes, as torch has it; "" where the file has none."""
        for values in (self.top_level, self.values):
            for key in ("torch_dtype", "dtype"):
                if values.get(key) is not None:
                    self.require(TEXT, key, values[key])
                    return str(values[key])
        return ""

    @property
    def nested_type(self) -> str:
        """The model_type of a nested text part; "" where there is none, or it is not given."""
        return str(self.values.get("model_type") or "") if self.values is not self.top_level else ""

    @property
    def quantisation(self) -> Mapping[str, Any]:
        """The values on quantised weights, of this file or one beside it; empty where they are not quantised."""
        for values, key in product((self.top_level, self.values), _QUANTISED):
            if values.get(key) is not None:
                return dict(self.require(MAP, key, values[key]))
        for name, more in _QUANTISED_BESIDE.items():
            if os.path.isfile(beside := self.path.with_name(name)):
                return {**more, **self.require(MAP, name, _read_json(beside))}
        return {}

    def describe_other_parts(self) -> list[str]:
        """Return a remark for each part beside the text's."""
        parts = [key.removesuffix("_config") for key in _OTHER_PARTS if self.top_level.get(key)]
        return [f"the {part} part of the model is not listed" for part in parts]

    def experts(self, some: bool) -> int:
        """Return how many experts a layer has, by any of the names of that number; 0 for none."""
        found = {self.count(key) for key in _EXPERTS if self.has(key)} if some else {0}
        if len(found) != 1:
            said = "says in several ways" if found else "does not say"
            raise InputError(f"{self.path}: the file {said} how many experts there are ({', '.join(_EXPERTS)})")
        return found.pop()

    def require_used(self, known: set[str]) -> None:
        """Refuse a file with a key that changes shapes and was not read."""
        for key, value in {**self.top_level, **self.values}.items():
            if key in known or key in self.read or not _CHANGES_SHAPES.fullmatch(key):
                continue
            kinds = set(map(str, value)) if isinstance(value, list) else set()
            if (
                kinds - _ATTENTION
                if key == "layer_types"
                else value and not isinstance(value, bool | str) and value != 1
            ):
                raise InputError(
                    f"{self.path}: {key} = {reprlib.repr(value)} changes the sizes in a way that is not known of "
                    f"{self._name}; {CAPTURE}"
                )

    def has(self, key: str) -> bool:
        """Return whether there is a value."""
        return self._find(key) is not None

    def integer(self, key: str) -> int:
        """Return a number that is at least 1."""
        return int(self._typed(_POSITIVE, key))

    def count(self, key: str) -> int:
        """Return a number that may be 0, as it is where the key is missing."""
        return int(self._typed(_COUNT, key)) if self.has(key) else 0

    def flag(self, key: str) -> bool:
        """Return a flag, false where the key is missing."""
        return bool(self._typed(FLAG, key)) if self.has(key) else False

    def counts(self, key: str) -> list[int]:
        """Return a list of numbers, empty where the key is missing."""
        return list(self._typed(_COUNTS, key)) if self.has(key) else []

    @property
    def layers(self) -> int:
        """The number of the model's layers."""
        number = self.integer("num_hidden_layers")
        if number > MOST_LAYERS:
            raise InputError(f"{self.path}: num_hidden_layers must be at most {MOST_LAYERS}, not {number}")
        return number

    def _find(self, key: str) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        return self.usual.get(key) if value is None else value

    def _typed(self, kind: FieldKind, key: str) -> Any:
        value = self._find(key)
        if value is None:
            where = f" in {NESTED}" if self.values is not self.top_level else ""
            raise InputError(f"{self.path}: there is no {key}{where}, which the sizes of {self._name} follow from")
        return self.require(kind, key, value)

    @property
    def _name(self) -> str:
        return ", ".join(self.architectures)

    def require(self, kind: FieldKind, key: str, value: Any) -> Any:
        """Return the value, if it is of a kind."""
        try:
            kinds.require({key: value}, {key: kind})
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        return value


def read_config(place: Path) -> ModelConfig:
    """Return the values of a model's config.json: of its folder, the file, or a name that Hugging Face's client has."""
    path = place / FILE if os.path.isdir(place) else place if os.path.exists(place) else _find_downloaded(str(place))
    values = _read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a map of keys, not {reprlib.repr(values)}")
    nested = values.get(NESTED)
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"{path}: {NESTED} must be a map, not {reprlib.repr(nested)}")
    return ModelConfig(path, nested if nested is not None else values, values, {})


def _find_downloaded(name: str) -> Path:
    """Return the config.json of a model by the hub's name, in the revision last downloaded as its main one."""
    folder = settings.hub_folder()
    if _HUB_NAME.fullmatch(name):
        model = folder / f"models--{name.replace('/', '--')}"
        head = model / "refs" / "main"
        revision = read_bytes(head).decode("ascii", "replace").strip() if os.path.isfile(head) else ""
        path = model / "snapshots" / revision / FILE
        if _REVISION.fullmatch(revision) and os.path.isfile(path):
            return path
    raise InputError(
        f"{name}: there is no such folder with a model's {FILE}, and no downloaded model of that name in {folder}"
    )


def _read_json(path: Path) -> object:
    try:
        return json.loads(decode(path, "utf-8-sig"), object_pairs_hook=keys_once)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: it is not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{path}: its values are nested too deeply") from None
    except RepeatedKeyError as error:
        raise InputError(f"{path}: the key {reprlib.repr(error.key)} is there twice; keep one of them") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise InputError(f"{path}: {error}") from None
