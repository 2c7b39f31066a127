"""Reads search_spaces/*.yaml: facts of a target and axes of its templates, each merged over what it inherits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tritongemm.core.errors import InputError, TargetError
from tritongemm.core.target import Target
from tritongemm.search_spaces import schema as space_schema

SPACES = Path(__file__).parent
_WORD = re.compile(r"[a-z]+|[0-9]+")
_DEVICE = re.compile(r"[A-Za-z0-9_ +-]+")  # no path
# libyaml, where PyYAML has it, reads a target's files in a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NO_TARGETS = ("base", "tune_gemm")  # base files, and a space that is kept to compare with


def target_names() -> list[str]:
    """Return the architectures that have a search space; no other name is a target, and none is taken for a path."""
    return [name for name in _file_names() if name not in _NO_TARGETS]


def _file_names() -> list[str]:
    return sorted(p.stem for p in SPACES.glob("*.yaml"))


@cache
def space_file(name: str) -> dict[str, Any]:
    """Return the contents of search_spaces/<name>.yaml merged over what it inherits.

    No such file raises a TargetError; one that is no map with the sections target and templates an InputError.
    """
    if name not in _file_names():
        raise _unknown(name)
    path = SPACES / f"{name}.yaml"
    try:
        data: Any = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except yaml.YAMLError as error:
        raise InputError(f"search_spaces/{path.name} is not YAML: {' '.join(str(error).split())}") from None
    sections = ("target", "templates")
    if not isinstance(data, dict) or not all(isinstance(data.get(s, {}), dict) for s in sections):
        raise InputError(f"search_spaces/{path.name} must be a map with the sections target and templates")
    devices = data.get("devices", {})
    if not isinstance(devices, dict) or not all(isinstance(d, dict) for d in devices.values()):
        raise InputError(f"search_spaces/{path.name}: devices must be a map of maps of facts, by the name of the chip")
    chips = data.setdefault("chips", [])  # those of what it inherits are others
    if not isinstance(chips, list) or not all(isinstance(chip, str) for chip in chips):
        raise InputError(f"search_spaces/{path.name}: chips must be a list of words of the names of devices")
    parent = data.pop("inherit", None)
    if parent and parent not in _file_names():
        raise InputError(f"search_spaces/{path.name} inherits {parent!r}, which is not there")
    try:
        merged = _merge(space_file(parent), data) if parent else data
    except RecursionError:
        raise InputError(f"search_spaces/{path.name} inherits {parent!r}, which inherits it in turn") from None
    for section in sections:
        if section not in merged:
            raise InputError(f"search_spaces/{path.name} has no section {section}, nor has what it inherits")
    return merged


def target_of_device(device: str) -> str:
    """Return the architecture of the chip that a driver's or a file's name of a device holds; "" where none is known.

    Such names are ``NVIDIA H200``, ``AMD_Instinct_MI300X``, ``gfx942:sramecc+:xnack-`` or ``rtx5090``.
    """
    words = _words(device)
    found = [name for name in target_names() if any(_words(w) in words for w in (name, *space_file(name)["chips"]))]
    return found[0] if len(found) == 1 else ""


def chips_of(device: str) -> frozenset[str]:
    """Return the chips of its target whose names the name of a device holds."""
    target = target_of_device(device)
    chips = space_file(target)["chips"] if target else ()
    return frozenset(chip for chip in chips if _words(chip) in _words(device))


def _words(text: str) -> str:
    """Return the words and numbers of a name, in small letters and with a blank around each."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def _unknown(name: str) -> TargetError:
    start = _words(name).rstrip()
    chips = [chip for target in target_names() for chip in space_file(target)["chips"]]
    meant = [chip for chip in chips if start and _words(chip).startswith(start)]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return TargetError(
        f"unknown target {name[:100]!r}; there are: {', '.join(target_names())}, or a GPU's name, such as h200{hint}"
    )


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`: maps merge, but peak_tflops and devices are replaced, as lists are."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in ("peak_tflops", "devices")
        merged[key] = _merge(base[key], value) if nested else value
    return merged


def load_target(name: str, device_name: str = "", **measured: int) -> Target:
    """Return the target of an architecture, or of a device that has it, as of `target_of_device`.

    `device_name` is what the driver calls the chip, to distinguish siblings; `measured` are facts of a present device,
    such as compute_units, which override the file's. An unknown architecture raises a TargetError, a wrong file an
    InputError.
    """
    of_device = target_of_device(name) if _DEVICE.fullmatch(name) else ""
    arch = name if name in target_names() else of_device
    if not arch:
        raise _unknown(name)
    data = space_file(arch)
    facts: dict[str, Any] = dict(data["target"])
    for sibling, corrections in data.get("devices", {}).items():
        if sibling in (device_name or name):
            facts.update(corrections)
    found = space_schema.read_target(f"search_spaces/{arch}.yaml: target", arch, facts)
    facts = dict[str, Any](measured)
    return replace(found, **facts)
