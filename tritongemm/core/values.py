"""Kinds of values that fields may hold, and the validation of values read from a file."""

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from tritongemm.core.config import AXES, Config
from tritongemm.core.errors import InputError

MOST = 2**31 - 1  # Whole numbers of a config are passed to kernels in 32 bits.
MOST_OF_OPTION = 2**63 - 1  # Libraries number their algorithms in up to 64 bits.
_MOST_RATIO = 1e13  # of two times
_LARGEST = sys.float_info.max
# Enough for a template that is a mangled name of C++; Python reads no number of more than 4300 digits.
_LONGEST_CONFIG_NAME = 4096  # characters


@dataclass(frozen=True)
class FieldKind:
    """What a field may hold, with `words` for messages, e.g. ``a positive number``."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Return whether it is text that can be written: JSON and YAML can name halves of characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_measured_elsewhere(m: object, numbers: object) -> bool:
    """Return whether it is an M as text, with a regret and a share."""
    if not isinstance(m, str) or not m.isdecimal() or len(m) > 10:
        return False
    return (
        isinstance(numbers, list | tuple)
        and len(numbers) == 2
        and all(_is_number(v) and 0 <= v <= _MOST_RATIO for v in numbers)
    )


TEXT = FieldKind("text", _is_text)
FLAG = FieldKind("true or false", lambda v: isinstance(v, bool))
POSITIVE = FieldKind("a positive number", lambda v: _is_number(v) and 0 < v <= _LARGEST)
# No launch takes less or more, and sums and ratios of such times are finite.
SECONDS = FieldKind("a time from 1 ns to 10,000 s", lambda v: _is_number(v) and 1e-9 <= v <= 1e4)
SECONDS_OR_NONE = FieldKind(f"{SECONDS.words}, or null", lambda v: v is None or SECONDS.holds(v))
# A result with NaN is infinitely wrong.
DEVIATION = FieldKind("a number from 0 on, or null", lambda v: v is None or (_is_number(v) and 0 <= v <= inf))
FINITE = FieldKind("a finite number from 0 on", lambda v: _is_number(v) and 0 <= v <= _LARGEST)
FINITE_OR_NONE = FieldKind("a finite number from 0 on, or null", lambda v: v is None or FINITE.holds(v))
TIMES = FieldKind("a list of times from 1 ns to 10,000 s", lambda v: isinstance(v, list) and all(map(SECONDS.holds, v)))
TEXTS = FieldKind(
    "a map of text", lambda v: isinstance(v, Mapping) and all(_is_text(one) for pair in v.items() for one in pair)
)
HELD_OUT = FieldKind(
    "a map of two ratios of times for each M",
    lambda v: isinstance(v, Mapping) and all(_is_measured_elsewhere(*each) for each in v.items()),
)
MAP = FieldKind("a map", lambda v: isinstance(v, Mapping))


def integer(least: int, most: int) -> FieldKind:
    """Return the kind of a field that holds an integer within bounds."""
    return FieldKind(
        f"a whole number from {least} to {most}",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most,
    )


def list_of(kind: FieldKind, count: int | None = None, most: int = MOST) -> FieldKind:
    """Return the kind of a field that holds a list of values of a kind, `count` or at most `most` of them."""

    def holds(value: Any) -> bool:
        fits = isinstance(value, list) and (len(value) <= most if count is None else len(value) == count)
        return fits and all(map(kind.holds, value))

    return FieldKind(f"a list of {f'{count} times ' if count else ''}{kind.words}", holds)


def map_of(kind: FieldKind, most: int) -> FieldKind:
    """Return the kind of a field that holds a map to at most `most` values of a kind."""
    return FieldKind(
        f"a map of {kind.words}",
        lambda v: isinstance(v, Mapping) and len(v) <= most and all(map(kind.holds, v.values())),
    )


def one_of(*choices: str) -> FieldKind:
    """Return the kind of a field that holds one of a few words."""
    return FieldKind(f"one of {', '.join(choices)}", lambda v: isinstance(v, str) and v in choices)


NATURAL = integer(0, MOST)

# Types of fields that files say, with what they may hold.
Text: TypeAlias = Annotated[str, TEXT]
Flag: TypeAlias = Annotated[bool, FLAG]
Natural: TypeAlias = Annotated[int, NATURAL]
Deviation: TypeAlias = Annotated[float | None, DEVIATION]
FiniteOrNone: TypeAlias = Annotated[float | None, FINITE_OR_NONE]
SecondsOrNone: TypeAlias = Annotated[float | None, SECONDS_OR_NONE]


def kinds_of(noun: type) -> dict[str, FieldKind]:
    """Return what the fields of a class may hold, of those whose annotations say it."""
    hints = get_type_hints(noun, include_extras=True).items()
    return {name: get_args(hint)[1] for name, hint in hints if get_origin(hint) is Annotated}


def require(values: Mapping[str, Any], kinds: Mapping[str, FieldKind]) -> None:
    """Refuse values that are not of their fields' kinds; a field without a value is passed over.

    The InputError names the field, what it may hold, and the beginning of what it holds.
    """
    for field, kind in kinds.items():
        if field in values and not kind.holds(values[field]):
            raise InputError(f"{field} must be {kind.words}, not {reprlib.repr(values[field])}")


def check_size(name: str, value: object) -> int:
    """Return a size, which must be a whole number from 1 on. Raises InputError: names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be a whole number, not {value!r}")
    if not 1 <= value <= MOST:
        raise InputError(f"{name} must be between 1 and {MOST}, not {value}")
    return value


def read_config(name: object) -> Config:
    """Return the config that a file names; an InputError where it is no such name, or a number is out of range."""
    if not isinstance(name, str) or len(name) > _LONGEST_CONFIG_NAME:
        raise InputError(f"config must be the name of a config, not {reprlib.repr(name)}")
    config = Config.parse(name)
    numbers = [(axis, getattr(config, axis), MOST) for axis in AXES]
    for field, value, most in [*numbers, *((option, value, MOST_OF_OPTION) for option, value in config.options)]:
        if value > most:
            raise InputError(f"config must have {field} up to {most}, not {value}")
    return config
