"""The class `Problem`, which is one GEMM to tune: C[M, N] = A[M, K] @ B[K, N] (+ bias), C row-major."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tritongemm.core.dtypes import DTYPES, DType
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import apportion, check_groups, group_ends, row_counts
from tritongemm.core.operands import OperandSpec
from tritongemm.core.scaling import Scaling
from tritongemm.core.values import FLAG, TEXT, require

MAX_DIM = 2**31 - 1
BIASES = ("none", "m", "n")
SHARED = ("", "a", "b")
DEFAULT_FAMILY = "dense"  # of a problem whose key names none
PLAIN = "plain"  # the order of a B that is in rows or columns, as `row_major_b` says


@dataclass(frozen=True, order=True)
class Problem:
    """One GEMM.

    Attributes:
        m, n, k: sizes, at least 1.
        dtype_a, dtype_b, dtype_c: names of `core.dtypes.DTYPES`.
        row_major_a: A is stored [M, K]; otherwise [K, M].
        row_major_b: B is stored [K, N]; otherwise [N, K], as the weight of a linear layer is.
        bias: ``none``, ``m`` (one value per row of C) or ``n`` (one per column).
        batch: number of independent GEMMs; operands are [batch, …], one after the other in memory.
        family: plug-in of numerics/families that makes inputs, the reference and the tolerance.
        order_b: memory layout of B: ``plain``, or a plug-in of numerics/weight_layouts.
        scale_a, scale_b: the scale factors of A and of B; None where it has none. `Family.problem` fills them in.
        groups: number of products of different M that share one call (a mixture of experts); their rows add up to M.
            B is [groups, K, N].
        group_form: ``contiguous``: A is [M, K], the rows of each group behind those of the last, and the operand
            ``offsets`` says where each ends. ``masked``: A is [groups, room, K], and ``counts`` says how many rows of
            each group there are.
        spread: the spread of rows over groups in tuning: ``uniform``, ``skewed``, or ``captured``: as in `counts`.
            Kernels read the numbers of rows on the device, and are correct for any spread.
        counts: the rows of each group, where they were captured.
        room: rows that each group of the masked form has room for; 0 of the other.
        scales: name of the pair of scale_a and scale_b (`core.scaling.granularity`) where it is not the first of those
            that the family has; "" where it is. `Family.problem` sets it.
        shared: ``a`` or ``b``: that operand, with its scales, is one for the entire batch and has no dimension for it;
            "" where each product has its own.
    """

    m: int
    n: int
    k: int
    dtype_a: str = "fp16"
    dtype_b: str = "fp16"
    dtype_c: str = "fp16"
    row_major_a: bool = True
    row_major_b: bool = True
    bias: str = "none"
    batch: int = 1
    family: str = DEFAULT_FAMILY
    order_b: str = PLAIN
    scale_a: Scaling | None = None
    scale_b: Scaling | None = None
    groups: int = 1
    group_form: str = "contiguous"
    spread: str = "uniform"
    counts: tuple[int, ...] = ()
    room: int = 0
    scales: str = ""
    shared: str = ""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch", "groups"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name.upper()} must be a whole number, not {value!r}")
            if not 1 <= value <= MAX_DIM:
                raise InputError(f"{name.upper()} must be between 1 and {MAX_DIM}, not {value}")
        for name in ("dtype_a", "dtype_b", "dtype_c"):
            if getattr(self, name) not in DTYPES:
                raise InputError(f"{name} is {getattr(self, name)!r}; known dtypes: {', '.join(DTYPES)}")
        if self.bias not in BIASES:
            raise InputError(f"bias must be one of {', '.join(BIASES)}, not {self.bias!r}")
        if self.shared not in SHARED:
            raise InputError(f"shared must be a or b, the operand that a batch has once, not {self.shared!r}")
        if self.shared and self.batch == 1:
            raise InputError(f"shared is {self.shared!r}, but the batch is 1: leave it out, or name the batch")
        if self.groups > 1:
            check_groups(self.m, self.groups, self.group_form, self.spread, self.counts, self.room)
        elif (self.group_form, self.spread, self.counts, self.room) != _ONE_GROUP:
            raise InputError("group_form, spread, counts and room are of a product of several groups")

    @property
    def a(self) -> DType:
        """The type of A."""
        return DTYPES[self.dtype_a]

    @property
    def b(self) -> DType:
        """The type of B."""
        return DTYPES[self.dtype_b]

    @property
    def c(self) -> DType:
        """The type of C."""
        return DTYPES[self.dtype_c]

    @property
    def kind(self) -> str:
        """``one`` product, ``batched`` (equal products side by side) or ``grouped`` (products of different M)."""
        return "grouped" if self.groups > 1 else "batched" if self.batch > 1 else "one"

    @cached_property
    def operands(self) -> dict[str, OperandSpec]:
        """The operands of a kernel by name: a, b, c, then scale_a, scale_b, bias, offsets or counts, if any."""
        m, n, k = self.rows, self.n, self.k
        batch = {name: 0 if self.batch == 1 or self.shared == name else self.batch for name in "abc"}
        each = (self.groups,) if self.groups > 1 else ()
        within = (self.groups, self.room) if self.room else (m,)
        specs = [
            OperandSpec("a", self.a, (*within, k), "rows" if self.row_major_a else "columns", batch=batch["a"]),
            OperandSpec(
                "b",
                self.b,
                (*each, k, n),
                self.order_b if self.order_b != PLAIN else "rows" if self.row_major_b else "columns",
                batch=batch["b"],
            ),
            OperandSpec("c", self.c, (*within, n), "rows", batch=batch["c"]),
        ]
        for name, scaling, rows in (("scale_a", self.scale_a, m), ("scale_b", self.scale_b, n)):
            if scaling is not None:
                shape: tuple[int, ...] = scaling.shape(rows, k)
                if scaling.applied == "epilogue" and name == "scale_b":
                    shape = shape[:1]  # so that it broadcasts over the columns of C
                    shape = (self.groups * shape[0],)  # those of all groups one after another
                elif each and (name == "scale_b" or (self.room and scaling.layout == "groups")):
                    shape = (self.groups, *scaling.shape(self.room if name == "scale_a" else rows, k))
                where = scaling.layout, scaling.applied, scaling, batch[name[-1]]
                specs.append(OperandSpec(name, DTYPES[scaling.dtype], shape, *where))
        if self.bias != "none":
            shape = (m, 1) if self.bias == "m" else (n,)
            specs.append(OperandSpec("bias", self.bias_dtype, shape, "rows", "epilogue", batch=batch["c"]))
        if self.groups > 1:
            specs.append(OperandSpec(self.group_operand, DTYPES["int32"], (self.groups,), "rows", "groups"))
        return {spec.name: spec for spec in specs}

    @cached_property
    def extras(self) -> tuple[OperandSpec, ...]:
        """The operands besides A, B and C, with those of the epilogue in the order in which it applies them."""
        return tuple(self.operands.values())[3:]

    @property
    def leads(self) -> tuple[int, int, int]:
        """Elements between the stored rows or columns of A, of B and of C, if these are contiguous."""
        return self.k if self.row_major_a else self.m, self.n if self.row_major_b else self.k, self.n

    @property
    def rows(self) -> int:
        """Rows of A and of C in memory: M, or in the masked form also the unused ones."""
        return self.groups * self.room if self.room else self.m

    @property
    def group_operand(self) -> str:
        """The operand that assigns rows to groups: ``offsets``, ends of groups, or ``counts``."""
        return "offsets" if self.group_form == "contiguous" else "counts"

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """The rows of each group in tuning."""
        return self.counts or row_counts(self.m, self.groups, self.spread)

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """The values of `group_operand` in tuning."""
        return group_ends(self.row_counts) if self.group_form == "contiguous" else self.row_counts

    def at(self, m: int) -> Problem:
        """The same product at another M; where each group has room for equally many rows, at that many rows a group.

        Groups whose rows were captured have skewed ones then.
        """
        if self.room:
            return replace(self, m=min(self.m, self.groups * m), room=m, spread="uniform", counts=())
        return replace(self, m=m, spread="skewed" if self.counts else self.spread, counts=())

    def spread_as(self, other: Problem) -> Problem:
        """This product with its rows spread over the groups in proportion to the captured counts of another M."""
        return replace(self, spread="captured", counts=apportion(self.m, other.counts))

    @property
    def scale_depth(self) -> int:
        """Elements along K after which a scale factor changes; 0 where none changes along K."""
        return min((s.depth for s in (self.scale_a, self.scale_b) if s is not None and s.depth), default=0)

    @property
    def microscaled(self) -> bool:
        """Whether the factors of A and of B are powers of two along K (OCP MX), which matrix units may apply."""
        return all(s is not None and s.dtype == "e8m0" and s.depth for s in (self.scale_a, self.scale_b))

    @property
    def bias_dtype(self) -> DType:
        """C's dtype, or the narrowest sensible one where C is eight bits wide."""
        narrow = {"int8": DTYPES["int32"]}.get(self.dtype_c, DTYPES["fp16"])
        return narrow if self.c.bytes == 1 else self.c

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: A, B, scales and the bias read once, C written once."""
        bias = {"none": 0, "m": self.m, "n": self.n}[self.bias] * self.bias_dtype.bytes
        a, b = self.m * self.k * self.a.bytes // self.a.packed, self.k * self.n * self.b.bytes // self.b.packed
        c = self.m * self.n * self.c.bytes
        b *= sum(rows > 0 for rows in self.row_counts) if self.groups > 1 else 1
        once = {"": 0, "a": a, "b": b}[self.shared]
        scales = sum(e.count * e.dtype.bytes for e in self.extras if e.scaling is not None)
        return self.batch * (a + b + c + bias - once) + once + scales

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that A, B, C and a bias take; of groups without rows too, which nothing reads."""
        if self.groups == 1:
            return self.bytes
        return sum(s.count * s.dtype.bytes // s.dtype.packed for s in self.operands.values())

    @property
    def layout(self) -> str:
        """BLAS letters of A and B as tune_gemm writes them: T is row-major, N column-major."""
        return ("T" if self.row_major_a else "N") + ("T" if self.row_major_b else "N")

    @property
    def dtypes(self) -> str:
        """The three dtypes, shortened when they agree."""
        names = (self.dtype_a, self.dtype_b, self.dtype_c)
        return names[0] if len(set(names)) == 1 else "-".join(names)

    @property
    def product(self) -> str:
        """The product without its M, as tables over M name it."""
        bias = "" if self.bias == "none" else f", bias {self.bias}"
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        shared = f" that share {self.shared.upper()}" if self.shared else ""
        return f"N {self.n}, K {self.k}, {self.dtypes} {self.layout}{bias}{batch}{shared}"

    @property
    def key(self) -> str:
        """Identity as text, e.g. ``16x16x16_fp16_TT``; equal keys are equal problems."""
        parts = [f"{self.m}x{self.n}x{self.k}", self.dtypes, self.layout]
        parts += [f"bias{self.bias}"] if self.bias != "none" else []
        parts += [f"batch{self.batch}"] if self.batch != 1 else []
        parts += [f"shared{self.shared}"] if self.shared else []
        parts += [f"groups{self.groups}"] if self.groups != 1 else []
        parts += [f"room{self.room}"] if self.room else []
        parts += [self.spread + _digest(self.counts)] if self.spread != "uniform" else []
        parts += [self.family] if self.family != DEFAULT_FAMILY else []
        parts += [self.scales] if self.scales else []
        parts += [self.order_b] if self.order_b != PLAIN else []
        return "_".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; those that came after schema 1 only where they are not at their defaults."""
        data = {name: getattr(self, name) for name in _FIELDS}
        for name in ("scale_a", "scale_b"):
            data[name] = data[name].to_json() if data[name] else None
        later: dict[str, object] = {"order_b": PLAIN, "scale_a": None, "scale_b": None, "groups": 1}
        later |= {"scales": "", "shared": ""} | dict(zip(_GROUP_FIELDS, _ONE_GROUP, strict=True))
        data = {k: v for k, v in data.items() if k not in later or v != later[k]}
        return data | ({"counts": list(self.counts)} if self.counts else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Return what `to_json` was called on; fields that came later are at their defaults where the data has none.

        Raises:
            InputError: a value is not of its field's kind, or out of range.
            KeyError, TypeError: a field is missing or of another type.
        """
        known = {name: data[name] for name in _FIELDS if name in data}
        require(known, _KINDS)
        for name in ("scale_a", "scale_b"):
            if known.get(name):
                known[name] = Scaling.from_json(known[name])
        if "counts" in known:
            known["counts"] = tuple(known["counts"])
        return cls(**known)


def _digest(counts: tuple[int, ...]) -> str:
    """Return a few letters that distinguish counts; "" of none."""
    return hashlib.sha256(",".join(map(str, counts)).encode()).hexdigest()[:8] if counts else ""


_GROUP_FIELDS = ("group_form", "spread", "counts", "room")
_ONE_GROUP: tuple[object, ...] = ("contiguous", "uniform", (), 0)  # their values where there are no groups
_FIELDS = tuple(f.name for f in fields(Problem))
_KINDS = dict.fromkeys(("row_major_a", "row_major_b"), FLAG) | dict.fromkeys(("family", "order_b", "scales"), TEXT)
