"""Holds what lines of several logs share: the fields of a call, named as hipBLASLt and rocBLAS name them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from tritongemm.core.errors import InputError
from tritongemm.plugins.contracts.call_logs import SCALES, LogContents, LogFault, LoggedCall, LoggedRow
from tritongemm.system.printable import printable

_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_WIDE = re.compile(r"[0-9]{1,19}", re.ASCII)
_REAL = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?", re.ASCII)
_TRANSPOSE = ("N", "T", "C")
_TYPE = re.compile(r"[a-z]+[0-9]*\w*_r", re.ASCII)
_COMPLEX_TYPE = re.compile(r"[a-z0-9]+_c", re.ASCII)
_COMPUTE = re.compile(r"(c_)?[a-z]+[0-9]+(_\w+)?_[rc]", re.ASCII)
_OFF = ("", "0", "false", "none", "strided")
_BLOCKS = {"vec128_32f": "1x128", "blk128x128_32f": "128x128"}  # cuBLASLt's names, which fix the layout too
GROUPED = "grouped_gemm"  # of a call of several products; the sizes of each follow one after another
OTHERS = "others"  # a reader's own field: requests that have no field
# Requests beyond the fields of a `LoggedCall`; each makes another product.
_MORE = ("gradient", "use_e", "swizzleA", "swizzleB", "scaleAlpha_vector", "batch_mode", GROUPED)
_SIZES = ("M", "N", "K")
_OF_A_PRODUCT = {
    *_SIZES, *(f"{kind}{which}" for kind in ("ld", "stride_") for which in "abcde"),
}  # fmt: skip


class Fields(Mapping[str, str]):
    """The values of one line, as text."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.pairs = tuple(values.items())

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number."""
        text = self._required(name, default)
        if text is None:
            assert default is not None
            return default
        kind = _NUMBER if least else _WIDE
        if not kind.fullmatch(text) or int(text) < least:
            raise InputError(f"{name} must be a whole number of at least {least}, not {printable(text, 60)!r}")
        return int(text)

    def real(self, name: str, default: float) -> float:
        """Return a number; NaN where the log could not read it from the device."""
        text = self.get(name)
        if text is None:
            return default
        if text in ("?", "nan", "-nan"):
            return math.nan
        if not _REAL.fullmatch(text):
            raise InputError(f"{name} must be a number, not {printable(text, 60)!r}")
        return float(text)

    def word(self, name: str, is_one: Callable[[str], object], what: str) -> str:
        """Return a text of a kind."""
        text = self._required(name, None)
        if text is None or not is_one(text):
            raise InputError(f"{name} must be {what}, not {printable(text or '', 60)!r}")
        return text

    def is_on(self, name: str) -> bool:
        """Return whether a field asks for something: its value is not among those that mean no."""
        return self.get(name, "").lower() not in _OFF

    def _required(self, name: str, default: object) -> str | None:
        if name in self:
            return self[name]
        if default is None:
            raise InputError(f"it has no {name}")
        return None


def is_type(text: str) -> bool:
    """Return whether a text is the name of a type of numbers, known here or not."""
    return bool(_TYPE.fullmatch(text) or _COMPLEX_TYPE.fullmatch(text))


def split_groups(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]] | str:
    """Return the fields of each product of a line, which most often has one; or what is wrong with the line.

    A product of a group that has no rows, or no columns, takes no time and is left out.
    """
    values: dict[str, str] = {}
    of_groups: dict[str, list[str]] = {}
    grouped = any(name == GROUPED for name, _ in pairs)
    for name, value in pairs:
        if grouped and name in _OF_A_PRODUCT:
            of_groups.setdefault(name, []).append(value)
        elif name in values:
            return f"has two values of {name}"
        else:
            values[name] = value
    if not grouped:
        return [values]
    counts = {len(several) for several in of_groups.values()}
    if len(counts) != 1 or not of_groups.keys() >= set(_SIZES):
        return "does not say as many sizes of each kind for its groups"
    of_each = zip(*of_groups.values(), strict=True)
    products = [values | dict(zip(of_groups, own, strict=True)) for own in of_each]
    return [one for one in products if "0" not in [one[name] for name in _SIZES]]


def write_into_c(values: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a call; where D has none of its own, it is written into C."""
    strides_of_c = {d: values[c] for c, d in (("ldc", "ldd"), ("stride_c", "stride_d")) if c in values}
    return {**strides_of_c, **values}


def read_call(fields: Fields) -> LoggedCall:
    """Return the call whose fields have the names of hipBLASLt's profile."""
    c, d = fields.get("c_type"), fields.get("d_type")
    types = [
        fields.word(name, is_type, "the name of a type")
        for name in ("a_type", "b_type", "c_type" if c else "d_type", "d_type" if d else "c_type")
    ]
    batch = fields.integer("batch_count", 1, least=1)
    return LoggedCall(
        m=fields.integer("M", least=1),
        n=fields.integer("N", least=1),
        k=fields.integer("K", least=1),
        transposes="".join(fields.word(name, _TRANSPOSE.__contains__, "N, T or C") for name in ("transA", "transB")),
        types=(types[0], types[1], types[2], types[3]),
        compute=fields.word("compute_type", _COMPUTE.fullmatch, "the name of a type of sums").removeprefix("c_"),
        leads=_four(fields.integer(f"ld{which}", 0) for which in "abcd"),
        batch=batch,
        strides=_four((fields.integer(f"stride_{which}", 0) if batch > 1 else 0) for which in "abcd"),
        alpha=fields.real("alpha", 1.0),
        beta=fields.real("beta", 0.0),
        bias=_bias(fields),
        scales=_scales(fields),
        activation=_activation(fields),
        others=tuple(_list_others(fields)),
    )


def _list_others(fields: Fields) -> Iterator[str]:
    yield from (f"{name} {printable(fields[name], 40)}" for name in _MORE if fields.is_on(name))
    if OTHERS in fields:
        yield printable(fields[OTHERS], 200)


def _four(values: Iterable[int]) -> tuple[int, int, int, int]:
    a, b, c, d = values
    return a, b, c, d


def _bias(fields: Fields) -> str:
    """Return the type of the bias; "" where there is none. A sum of an operand's gradient is another kind."""
    if not fields.is_on("bias_vector"):
        return ""
    return fields.get("bias_type", "") or fields.get("d_type", "")


def _scales(fields: Fields) -> tuple[str, str, str, str]:
    """Return how each operand is scaled; older versions write true for a single factor."""
    a, b, c, d = (_scale(fields.get(name, "0").lower()) for name in ("scaleA", "scaleB", "scaleC", "scaleD"))
    return a, b, c, d


def _scale(text: str) -> str:
    if text in _OFF:
        return SCALES[0]
    if text in ("true", "s"):
        return SCALES[1]
    if text == "v":
        return SCALES[2]
    if text in _BLOCKS:
        return _BLOCKS[text]
    if text not in map(str, range(len(SCALES))):
        return f"the format {printable(text, 20)}"  # such as 4 to 8, blocks of other sizes and types of factors
    return SCALES[int(text)]


def _activation(fields: Fields) -> str:
    text = fields.get("activation_type", "none")
    return "none" if text.lower() in _OFF else printable(text, 40)


@lru_cache(maxsize=1 << 14)
def _known_call(pairs: tuple[tuple[str, str], ...]) -> LoggedCall:
    """Return `read_call`, cached: most lines of a log are equal, and checking one takes 0.2 ms."""
    return read_call(Fields(dict(pairs)))


def add_row(contents: LogContents, fields: Fields, line: int, kind: str, count: float = 1.0) -> bool:
    """Add a line's call, or a fault where it has none; return whether it has one."""
    try:
        call = _known_call(fields.pairs)
    except InputError as error:
        contents.faults.append(LogFault(line, str(error)))
        return False
    contents.rows.append(LoggedRow(call, count, line, kind))
    return True
