"""Lists the weights of a model as transformers builds it, on PyTorch's meta device, without any memory.

The file's values choose among transformers' own classes. Nothing is downloaded, and no code beside the file is run.
"""

import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.workloads.layer_weights import FUSED, KEYS_AND_VALUES, OUTER_NAMES, Columns, LayerWeight, Weights
from tritongemm.workloads.model_config import CAPTURE, ModelConfig

# Of the file, these select code to run instead of shapes, or name classes one by one.
_NOT_SHAPES = re.compile(
    r".*_implementation.*|auto_map|quantization_config|(torch_)?dtype|_?name_or_path|num_labels|id2label|label2id"
)
_COUNTED = re.compile(r"layers|n_layer|experts|depth|blocks")
_ERRORS = 40  # the level of logging at which transformers still prints
_MOST_COUNTED = 20_000  # each is a Python object
_CHOSEN = ("top_k", "topk", "moe_topk", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
_IN_A_LIST = re.compile(r"(experts)\.\d+(?=\.)")
_NO_TEXT = re.compile(r"(^|[._])(vision|visual|image|img|audio|speech|video|talker|token2wav|code2wav)")
_NO_PRODUCT = re.compile(r"Embed|Conv|Norm|Parametrization")
_PLANNED = {"colwise": "columns", "rowwise": "rows"}
_UNQUANTISED = (
    "gate",
    "router",
    "shared_expert_gate",
    "classifier",
    "lm_head",
)  # quantised models keep these unquantised
_LEAST_UNLISTED = 2**14  # elements of a parameter


def has_transformers() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("transformers") is not None


def find_class(config: ModelConfig) -> Any:
    """Return the first class named in a file that transformers has, or its class for the file's type; or None."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures:
        found = getattr(transformers, name, None) if name.isidentifier() and not name.startswith("_") else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if not config.architectures:
        kind = config.top_level.get("model_type")
        for names in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        ):
            if isinstance(kind, str) and isinstance(found := names.get(kind), str):
                return getattr(transformers, found)
    return None


def read_meta_model(config: ModelConfig, class_: Any) -> Weights:
    """Return the weights of a model of a class of transformers."""
    values = _keep_shapes(config.top_level)
    _require_few(config, values)
    try:
        with _offline():
            model, is_complete = _build(class_, values)
            text = model.config.get_text_config(decoder=True)
            found, known = _WeightReader(model, text).read(), _known_keys(text) | _known_keys(model.config)
    except Exception as error:  # the classes of 300 models may raise anything
        import transformers

        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{config.path}: transformers {transformers.__version__} can't build {class_.__name__}: "
            f"{type(error).__name__}: {reason}; {CAPTURE}"
        ) from None
    config.require_used(known)
    if config.values is config.top_level and text is not model.config:
        _require_read(config, text, class_)
    return found if is_complete else replace(found, left_out=(*found.left_out, *config.describe_other_parts()))


def _require_read(config: ModelConfig, text: Any, class_: Any) -> None:
    """Refuse a file without a text part if its numbers are not those of the language model that was built."""
    for key, value in config.values.items():
        if type(value) is not int or key.endswith("token_id"):
            continue
        if type(built := getattr(text, key, value)) is int and built != value:
            raise InputError(
                f"{config.path}: {class_.__name__} does not read {key} = {value} where it stands, and would have "
                f"{built}; a language model beside others is described in text_config; {CAPTURE}"
            )


def _keep_shapes(values: Any) -> Any:
    """Return the values without those that select code, at every level, and infinities as transformers reads them."""
    if isinstance(values, Mapping):
        if values.keys() == {"__float__"} and values["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(values["__float__"])
        return {key: _keep_shapes(value) for key, value in values.items() if not _NOT_SHAPES.fullmatch(key)}
    return [_keep_shapes(value) for value in values] if isinstance(values, list) else values


def _require_few(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts that no model has."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _require_few(config, value)
        elif isinstance(value, int) and value > _MOST_COUNTED and _COUNTED.search(key):
            raise InputError(f"{config.path}: {key} must be at most {_MOST_COUNTED}, not {value}")


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub's client from the network, and warnings about values that a file leaves out from the screen."""
    from huggingface_hub import constants
    from transformers.utils import logging

    before, level = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(_ERRORS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(level)


def _build(class_: Any, values: dict[str, Any]) -> tuple[Any, bool]:
    """Return the model, and whether it is complete: parts for images may need packages that its text part does not."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = class_.config_class.from_dict(values)
    with torch.device("meta"):
        try:
            return class_(config), True
        except Exception:
            text = config.get_text_config()
            of_text: Any = None if text is config else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
            if of_text is None:
                raise
            return of_text(text), False


def _known_keys(config: Any) -> set[str]:
    """Return the keys that a class of configs reads, under all their names."""
    kind = type(config)
    return {*vars(kind()), *kind.attribute_map, *kind.attribute_map.values()}


@dataclass(frozen=True)
class _WeightReader:
    """Reads weights from a model of transformers."""

    model: Any
    text: Any

    def read(self) -> Weights:
        """Return its weights, and remarks on its other products."""
        decoder, head = self._language_model()
        weights, outside, unlisted = dict[str, LayerWeight](), Counter[str](), Counter[str]()
        for name, module in self.model.named_modules(remove_duplicate=False):
            found = list(self._list_weights(name, module))
            if module is head and found:
                weights["lm_head"] = replace(found[0], name="lm_head", kept=True)
            elif not f"{name}.".startswith(decoder) or _NO_TEXT.search(name):
                outside.update({".".join(name.split(".")[:2]): len(found)})
            else:
                weights.update((weight.name, weight) for weight in found)
                unlisted.update(() if found else _name_unlisted(_inner(name), module))
        parts = ", ".join(f"{count} of {part}" for part, count in outside.items() if count)
        left_out = [f"layers outside the language model are not listed: {parts}"] if parts else []
        if unlisted:
            left_out.append(f"parameters of no linear layer are not listed: {', '.join(unlisted)}")
        return Weights(tuple(self._gather_lists(weights)), tuple(left_out))

    def _language_model(self) -> tuple[str, Any]:
        """Return the path of the part that reads text, with a dot, or "" for all; and the module behind it."""
        decoder = self.model.get_decoder() if self.text is not self.model.config else self.model
        head = self.model.get_output_embeddings() or (decoder is not self.model and decoder.get_output_embeddings())
        path = next(name for name, module in self.model.named_modules() if module is decoder)
        return f"{path}." if path else "", head

    def _list_weights(self, name: str, module: Any) -> Iterator[LayerWeight]:
        """Yield the weights that a module holds itself."""
        import torch
        from transformers.pytorch_utils import Conv1D

        kind = type(module).__name__
        shapes = {key: tuple(each.shape) for key, each in module.named_parameters(recurse=False)}
        experts = {key: shape for key, shape in shapes.items() if len(shape) == 3 and key in _EXPERTS}
        bias = any(key.endswith("bias") for key in shapes)
        if isinstance(module, torch.nn.Linear):
            yield self._linear(name, shapes["weight"], bias)
        elif isinstance(module, Conv1D):
            yield self._linear(name, shapes["weight"][::-1], bias)
        elif experts:
            yield from self._list_experts(name, module, experts, bias)
        elif len(shape := shapes.get("weight", ())) == 3 and kind.endswith("Experts"):
            groups, n, k = shape
            yield LayerWeight(_inner(name), (Columns(n),), k, bias, 0, groups, self._chosen(name))
        elif len(shape) == 2 and not _NO_PRODUCT.search(kind):
            yield LayerWeight(_inner(name), (Columns(shape[0]),), shape[1], bias, cut="none", kept=True)

    def _linear(self, name: str, shape: tuple[int, ...], bias: bool) -> LayerWeight:
        (n, k), (parent, _, last) = shape, name.rpartition(".")
        module = self.model.get_submodule(parent)
        width, heads = _number(module, "head_dim"), _number(module, "num_heads")
        if width and not heads:
            heads = _number(self.text, "num_attention_heads")

        def split(size: int, own: int) -> Columns:
            parts = own if own and size % own == 0 else size // width if width and size % width == 0 else 0
            return Columns(size, 0 if last == "in_proj" else parts)

        columns: tuple[Columns, ...] = (split(n, heads),)
        groups, states = _number(module, "n_groups"), _number(module, "ssm_state_size")
        if last in KEYS_AND_VALUES:
            columns = (replace(split(n, 0), copied=True),)
        elif last == "in_proj" and groups and states and n > 2 * groups * states:
            shared = Columns(groups * states, groups, True)
            columns = (Columns(n - 2 * groups * states), shared, shared)
        elif last in FUSED and width:
            of_keys = (n // width - heads) // 2
            if n == (heads + 2 * of_keys) * width and 0 < of_keys <= heads:
                shared = Columns(of_keys * width, of_keys, True)
                columns = (Columns(heads * width, heads), shared, shared)
        generic = re.sub(r"\.\d+(?=\.)", ".*", _inner(name))
        planned = (self.text.base_model_tp_plan or {}).get(generic, "")
        cut = next((cut for word, cut in _PLANNED.items() if word in planned), "none" if planned else "")
        return LayerWeight(_inner(name), columns, k, bias, split(k, heads).heads, cut=cut, kept=last in _UNQUANTISED)

    def _list_experts(
        self, name: str, module: Any, shapes: Mapping[str, tuple[int, ...]], bias: bool
    ) -> Iterator[LayerWeight]:
        """Yield the weights of experts that are one parameter of three dimensions each."""
        groups = min(shape[0] for shape in shapes.values())  # a router may have more experts than there are weights
        first, down = shapes.get("gate_up_proj") or shapes.get("up_proj"), shapes.get("down_proj")
        turned = vars(module).get("is_transposed")
        if turned is None:
            turned = bool(first and down and first[2] != down[1] and first[1] == down[2])
        chosen = groups if "shared" in name else self._chosen(name)
        for key, (_, *sides) in shapes.items():
            n, k = reversed(sides) if turned else sides
            columns = (Columns(n // 2),) * 2 if key == "gate_up_proj" else (Columns(n),)
            yield LayerWeight(f"{_inner(name)}.{key}", columns, k, bias, 0, groups, chosen)

    def _chosen(self, name: str) -> int:
        """Return how many experts a token goes to; 0 where neither the modules around them nor the config say so."""
        path = name.split(".")
        for length in range(len(path) - 1, max(len(path) - 4, 0), -1):
            block = self.model.get_submodule(".".join(path[:length]))
            for module in (block, *block.children()):
                if number := max(_number(module, key) for key in _CHOSEN):
                    return number
        return max(_number(self.text, key) for key in _CHOSEN)

    def _gather_lists(self, weights: Mapping[str, LayerWeight]) -> Iterator[LayerWeight]:
        """Yield the weights, with those of experts that are modules of a list as one."""
        lists: dict[str, list[LayerWeight]] = {}
        for weight in weights.values():
            lists.setdefault(_IN_A_LIST.sub(r"\1", weight.name), []).append(weight)
        for name, each in lists.items():
            if name == each[0].name:
                yield each[0]
            else:
                yield replace(each[0], name=name, groups=len(each), chosen=self._chosen(each[0].name))


def _inner(name: str) -> str:
    """Return the path of a module in the language model."""
    return OUTER_NAMES.sub("", name)


def _number(owner: Any, key: str) -> int:
    """Return a positive whole number of a module or a config; 0 where it has none, or one for each layer."""
    try:
        value = getattr(owner, key, 0)
    except Exception:  # transformers' own kind, where layers differ
        return 0
    return value if isinstance(value, int) and value > 0 else 0


def _name_unlisted(name: str, module: Any) -> Iterator[str]:
    """Yield the large parameters of several dimensions that are no linear layer's."""
    if not _NO_PRODUCT.search(type(module).__name__):
        for key, each in module.named_parameters(recurse=False):
            if each.dim() > 1 and each.numel() >= _LEAST_UNLISTED and not key.endswith(("bias", "A_log")):
                yield f"{re.sub(r'[.][0-9]+(?=[.])', '.*', name)}.{key} {list(each.shape)}"
