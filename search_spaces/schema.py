"""Checks files of search_spaces/: the facts of a target and the axes of its templates; errors name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.target import Target

# Texts of a file are put into generated modules, in quotes or behind a #, so they hold nothing that ends either.
_TEXT = re.compile(r"[\w .,:;$()\[\]/+-]*", re.ASCII)
_SIGNS = "letters, digits, blanks and . , : ; $ ( ) [ ] / + -"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _text(value: Any) -> bool:
    return isinstance(value, str) and _TEXT.fullmatch(value) is not None


def _name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


# What a fact must be, by the annotation of its field in `Target`.
_KINDS: dict[Any, tuple[str, Any]] = {
    int: ("a whole number, not negative", lambda v: _is_integer(v, 0)),
    float: ("a positive number", lambda v: _number(v) and v > 0),
    str: (f"text of {_SIGNS}", _text),
    Mapping[str, float]: (
        "a map of numbers",
        lambda v: _map(v) and all(_name(k) and _number(x) for k, x in v.items()),
    ),
    frozenset[str]: ("a list of names", lambda v: isinstance(v, list) and all(map(_name, v))),
}  # fmt: skip
_OTHER_AXES = ("microscaled", "four_bits")  # axes in place of those of other products
_SECTION = {"requires", "axes", "options", "aligned", "m", "operands", "along_k", "results", *_OTHER_AXES}


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _map(value: Any) -> bool:
    return isinstance(value, dict)


def _keys(where: str, found: Iterable[Any], needed: Iterable[str], known: Iterable[str]) -> None:
    lacking = [k for k in needed if k not in found]
    unknown = [str(k) for k in found if k not in known]
    if lacking or unknown:
        wrong = [f"lacks {', '.join(lacking)}"] if lacking else []
        wrong += [f"has {', '.join(unknown)}, which nothing reads"] if unknown else []
        raise InputError(f"{where} {' and '.join(wrong)}")


def check_target(where: str, section: Any, annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a target; an InputError names one that is missing, unknown or not as annotated."""
    if not _map(section):
        raise InputError(f"{where} must be a map of facts; there is {section!r}")
    _keys(where, section, annotations, annotations)
    for name, annotation in annotations.items():
        kind, fits = _KINDS[annotation]
        if not fits(section[name]):
            raise InputError(f"{where}: {name} must be {kind}, not {section[name]!r}")
    return dict(section)


def read_target(where: str, name: str, facts: Any) -> Target:
    """Return the target with facts from a file; an InputError names one that is missing, unknown or of another kind."""
    annotations = {name: hint for name, hint in get_type_hints(Target).items() if name != "name"}
    checked = check_target(where, facts, annotations)
    return Target(name=name, **{**checked, "features": frozenset(checked["features"])})


def target_facts(target: Target) -> dict[str, Any]:
    """Return the facts of a target as `read_target` reads them."""
    values = {f.name: getattr(target, f.name) for f in fields(Target) if f.name != "name"}
    maps = {name: dict(value) for name, value in values.items() if isinstance(value, Mapping)}
    return {**values, **maps, "features": sorted(target.features)}


def check_template(where: str, section: Any, axes: Iterable[str]) -> None:
    """Check one template's section; an InputError says what is missing, unknown or no list of whole numbers."""
    if not _map(section):
        raise InputError(f"{where} must be a map with requires and axes; there is {section!r}")
    _keys(where, section, ("requires", "axes"), _SECTION)
    for name in ("axes", "options", *_OTHER_AXES):
        if not _map(section.get(name, {})):
            raise InputError(f"{where}.{name} must be a map of lists; there is {section[name]!r}")
    _keys(f"{where}.axes", section["axes"], axes, axes)
    for name in _OTHER_AXES:
        _keys(f"{where}.{name}", section.get(name, {}), (), axes)
    for kind, least in (("axes", 1), ("options", 0), *((name, 1) for name in _OTHER_AXES)):
        for name, values in section.get(kind, {}).items():
            if not _name(name):
                raise InputError(f"{where}.{kind}: {name!r} can't be a name; it has small letters, digits and _")
            if not isinstance(values, list) or not values or not all(_is_integer(v, least) for v in values):
                raise InputError(
                    f"{where}.{kind}: {name} must be a list of whole numbers from {least} on, not {values!r}"
                )
    for name, few, what in (
        ("requires", None, "features"),
        ("aligned", {"a", "b", "c"}, "a, b and c"),
        ("operands", set(DTYPES), "dtypes"),
        ("along_k", set(DTYPES), "dtypes"),
        ("results", set(DTYPES), "dtypes"),
    ):
        values = section.get(name, [])
        if not isinstance(values, list) or (few and not few.issuperset(values)):
            raise InputError(f"{where}: {name} must be a list of {what}, not {values!r}")
    low_high = section.get("m", [1, 1])
    if not isinstance(low_high, list) or len(low_high) != 2 or not all(_is_integer(v, 1) for v in low_high):
        raise InputError(f"{where}: m must be two sizes, the least and the most, not {low_high!r}")
