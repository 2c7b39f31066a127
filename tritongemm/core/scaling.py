"""The class `Scaling`, which is the granularity and layout of an operand's scale factors, and named pairs of it."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

from tritongemm.core.dtypes import DTYPES, DType
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.values import NATURAL, FieldKind, Flag, Natural, Text, kinds_of, one_of, require

_PAD = FieldKind(
    "two whole numbers from 1 on",
    lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(NATURAL.holds(n) and n for n in v),
)


class Scaling(NamedTuple):
    """The scale factors of A or of B. A named tuple, for problems are hashed and compared often."""

    dtype: Annotated[str, one_of(*DTYPES)] = "fp32"  # name of their type, e.g. `fp32` or `e8m0`
    rows: Natural = 1  # rows of A (columns of B) that share a factor; 0 where all of them do
    depth: Natural = (
        0  # elements along K that share a factor; 0 where a full row does, so that the epilogue can apply it
    )
    # Their order in memory: `rows` [rows, groups along K], `groups` [groups along K, rows], or the name of a plug-in of
    # numerics/scale_layouts.
    layout: Text = "rows"
    pad: Annotated[tuple[int, int], _PAD] = (1, 1)  # multiples to which rows and groups are padded in memory
    # Whether each group along K has, behind the factors of all rows, their zero points less `INT4_ZERO`, which are
    # subtracted from the numbers before they are multiplied: [groups, 2, rows].
    zeros: Flag = False

    @property
    def applied(self) -> str:
        """Where a kernel multiplies by the factors: the ``epilogue``, or the ``mainloop`` where they change along K."""
        return "mainloop" if self.depth else "epilogue"

    def stored(self, rows: int, k: int) -> tuple[int, ...]:
        """Return the extents in memory, zero points too, for an operand of `rows` rows (columns of B) and K numbers."""
        first, second = self.shape(rows, k)
        return (first, 2, second) if self.zeros else (first, second)

    def shape(self, rows: int, k: int) -> tuple[int, int]:
        """Return the extents of the factors alone, as of `stored`."""
        across = round_up(cdiv(rows, self.rows) if self.rows else 1, self.pad[0])
        groups = round_up(cdiv(k, self.depth) if self.depth else 1, self.pad[1])
        return (groups, across) if self.layout == "groups" else (across, groups)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        data = {**self._asdict(), "pad": list(self.pad)}
        return data if self.zeros else {key: value for key, value in data.items() if key != "zeros"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scaling:
        """Return what `to_json` was called on; an InputError where values or fields are wrong."""
        require(data, _KINDS)
        if unknown := data.keys() - _KINDS:
            raise InputError(f"its problem has unknown keys: {', '.join(sorted(unknown))}")
        return cls(**{**data, "pad": tuple(data.get("pad", (1, 1)))})


_KINDS = kinds_of(Scaling)

# The scale factors of A and of B.
ScalePair: TypeAlias = "tuple[Scaling | None, Scaling | None]"

NO_SCALES: ScalePair = (None, None)
SCALED_BLOCK = 128  # Elements along K, and columns of B, that share a float32 factor where factors change along K.
MX_DEPTH = 32  # Elements along K that share a power of two.
NV_DEPTH = 16  # Elements along K of fp4 that share a factor which is no power of two (nvfp4).
PADDED_ROWS = 4  # Float32 factors that are the 16 bytes of which strides must be a multiple for TMA.
_BLOCK = Scaling(rows=SCALED_BLOCK, depth=SCALED_BLOCK)
_GROUP = Scaling(depth=SCALED_BLOCK)
_GROUP_BY_DEPTH = Scaling(depth=SCALED_BLOCK, layout="groups")
_GROUP_PADDED = Scaling(depth=SCALED_BLOCK, layout="groups", pad=(PADDED_ROWS, 1))
_MX = Scaling("e8m0", depth=MX_DEPTH)
_MX_SHUFFLED = Scaling("e8m0", depth=MX_DEPTH, layout="e8m0_32x8", pad=(32, 8))
WEIGHT_DEPTHS = (32, 64, 128)  # elements along K that share a factor of a weight of int4
_OF_WEIGHTS: dict[str, ScalePair] = {
    f"weight_{depth}{'_zeros' * zeros}{suffix}": (None, Scaling(dtype, depth=depth, layout="groups", zeros=zeros))
    for dtype, suffix in (("bf16", ""), ("fp16", "_fp16"))
    for zeros in (False, True)
    for depth in reversed(WEIGHT_DEPTHS)
}
# What a command line and a file call a pair; of those along K the first name is for factors that are stored
# [groups, rows], the one in _tma for such of A with its rows padded. Those of a weight alone say how many share one.
GRANULARITIES: dict[str, ScalePair] = {
    "tensor": (Scaling(rows=0), Scaling(rows=0)),
    "row": (Scaling(), Scaling()),
    "block": (_GROUP_BY_DEPTH, _BLOCK),
    "block_rows": (_GROUP, _BLOCK),
    "group": (_GROUP_BY_DEPTH, _GROUP_BY_DEPTH),
    "group_rows": (_GROUP, _GROUP),
    "block_tma": (_GROUP_PADDED, _BLOCK),
    "group_tma": (_GROUP_PADDED, _GROUP_BY_DEPTH),
    "mx": (_MX, _MX),
    "mx_shuffled": (_MX_SHUFFLED, _MX_SHUFFLED),
    "weight_mx": (None, _MX),
    "weight_16": (None, Scaling("bf16", depth=NV_DEPTH, layout="groups")),
    **_OF_WEIGHTS,
}
# Of a weight of four bits beside an A of eight: factors of A as of the first word, of the weight as of the others.
EIGHT_BY_FOUR = tuple(
    f"{of_a}_{of_b}"
    for of_a in ("row", "block", "block_rows")
    for of_b in ("weight_mx", *(name for name in _OF_WEIGHTS if "fp16" not in name))
    if of_a == "row" or of_b in ("weight_mx", "weight_128")
)
for _name in EIGHT_BY_FOUR:
    _of_a, _of_b = _name.split("_weight")
    GRANULARITIES[_name] = GRANULARITIES[_of_a][0], GRANULARITIES["weight" + _of_b][1]

_NAMES = {pair: name for name, pair in GRANULARITIES.items()}


def granularity(pair: ScalePair) -> str:
    """Return the name of a pair; "" for a pair without a name."""
    return _NAMES.get(pair, "")


def unusual_granularity(pair: ScalePair, dtype: DType) -> str:
    """Return the name of a pair; "" of one that products of A's type usually have, which keys and files do not name."""
    name = granularity(pair)
    return "" if name in ("row", "block", "mx_shuffled" if dtype.packed > 1 else "") else name


def find_pair(name: str, pairs: tuple[ScalePair, ...]) -> ScalePair | None:
    """Return the pair of this name, as of `granularity` with or without the factors' type; the first one for ""."""
    return next((p for p in pairs if name in ("", granularity(p), granularity(p).removesuffix("_fp16"))), None)


def choose_pair(name: str, pairs: tuple[ScalePair, ...]) -> ScalePair:
    """Return the pair as of `find_pair`; an InputError lists all names."""
    if found := find_pair(name, pairs):
        return found
    names = ", ".join(filter(None, map(granularity, pairs))) or "none"
    raise InputError(f"no scales of the granularity {name[:100]!r} in this family with these types; it has {names}")


MX_MODES = ("mx", "mx_shuffled")  # granularities with a power of two for each 32 elements of a row


def powers_of(mode: str) -> Scaling:
    """Return the powers of two of one of `MX_MODES`."""
    scaling, _ = GRANULARITIES[mode]
    assert scaling is not None
    return scaling
