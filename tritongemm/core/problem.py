"""The class `Problem`, which is one GEMM to tune: C[M, N] = A[M, K] @ B[K, N] (+ bias), C row-major."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tritongemm.core.dtypes import DTYPES, DType
from tritongemm.core.epilogues import EPILOGUES, IN_BLOCKS, RESIDUAL, RUN, is_gated, rows_of_factors
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups, apportion, group_ends
from tritongemm.core.operands import OperandSpec
from tritongemm.core.scaling import ScalePair, Scaling, unusual_granularity
from tritongemm.core.values import FLAG, MAP, MOST, NATURAL, TEXT, FieldKind, check_size, one_of, require

MAX_DIM = MOST
BIASES = ("none", "m", "n")
DEFAULT_FAMILY = "dense"  # of a problem whose key names none
PLAIN = "plain"  # the order of an operand that is stored in rows or columns, as its `row_major` says


class Operand(NamedTuple):
    """One matrix of a product. A named tuple, for problems are hashed and compared often."""

    dtype: str = "fp16"  # name of its type, of `core.dtypes.DTYPES`
    row_major: bool = True  # whether its rows are contiguous; otherwise its columns, as of the weight of a linear layer
    order: str = PLAIN  # memory layout of a weight: `plain`, or a plug-in of numerics/weight_layouts
    scaling: Scaling | None = None  # its scale factors; None where it has none. `Family.problem` fills them in
    shared: bool = False  # whether one, with its scales, serves an entire batch, and has no dimension for it

    @property
    def type(self) -> DType:
        """The type of its elements."""
        return DTYPES[self.dtype]


_PLAIN = Operand()


def matrices(  # noqa: D417 (A, B and C are what they are)
    a: str = "fp16", b: str = "", c: str = "", *, layout: str = "TT", order: str = PLAIN, shared: str = ""
) -> tuple[Operand, Operand, Operand]:
    """Return the operands A, B and C of a problem.

    Args:
        a, b, c: dtypes; "" for that of A.
        layout: of A and of B: T is row-major, N column-major.
        order: of B.
        shared: ``a`` or ``b``: the operand that a batch has once.
    """
    return (
        Operand(a, layout[0] == "T", shared=shared == "a"),
        Operand(b or a, layout[1] == "T", order, shared=shared == "b"),
        Operand(c or a),
    )


@dataclass(frozen=True)
class Problem:
    """One GEMM."""

    # m, n, k: sizes, at least 1
    m: int
    n: int
    k: int
    # a, b, c: the matrices A [M, K], B [K, N] and C [M, N], which is row-major
    a: Operand = _PLAIN
    b: Operand = _PLAIN
    c: Operand = _PLAIN
    bias: str = "none"  # `none`, `m` (one value per row of C) or `n` (one per column)
    batch: int = 1  # number of independent GEMMs; operands are [batch, …], one after the other in memory
    # The products of different M that share one call (a mixture of experts), whose rows add up to M and of which B is
    # [groups, K, N]; None of one product.
    groups: Groups | None = None
    family: str = DEFAULT_FAMILY  # plug-in of numerics/families that makes inputs, the reference and the tolerance
    # What is done with a complete sum, after scales and bias, of `core.epilogues.EPILOGUES`. A gated one stores a
    # column for two of B.
    epilogue: str = "none"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            check_size(name.upper(), getattr(self, name))
        for name in "abc":
            if getattr(self, name).dtype not in DTYPES:
                found = getattr(self, name).dtype
                raise InputError(f"dtype_{name} is {found!r}; known dtypes: {', '.join(DTYPES)}")
        if self.a.order != PLAIN or self.c != Operand(self.c.dtype):
            raise InputError("A is in rows or columns, and C in rows, without scales and one for each product")
        if self.bias not in BIASES:
            raise InputError(f"bias must be one of {', '.join(BIASES)}, not {self.bias!r}")
        if self.a.shared and self.b.shared:
            raise InputError("shared must be a or b, the operand that a batch has once, not both")
        if self.shared and self.batch == 1:
            raise InputError(f"shared is {self.shared!r}, but the batch is 1: leave it out, or name the batch")
        if self.epilogue not in EPILOGUES:
            raise InputError(f"epilogue must be one of {', '.join(EPILOGUES)}, not {self.epilogue!r}")
        if self.epilogue == RESIDUAL and self.bias != "none":
            raise InputError(f"with the epilogue {RESIDUAL} a matrix is added, and no bias; bias is {self.bias!r}")
        if self.groups:
            self.groups.require_rows(self.m)

    @property
    def fold(self) -> int:
        """Columns of B that become one of C: two with a gated epilogue."""
        return 2 if is_gated(self.epilogue) else 1

    @property
    def run(self) -> int:
        """Columns of gate in B after which as many of up follow: those that share factors; of groups, half of N."""
        return self.n // 2 if self.groups else max(RUN, self.b.scaling.rows if self.b.scaling else 0)

    @property
    def in_blocks(self) -> bool:
        """Whether C is quantised, with factors behind its rows."""
        return self.epilogue in IN_BLOCKS

    @property
    def without_epilogue(self) -> Problem:
        """The product that an epilogue follows; one in blocks is of bf16."""
        if self.epilogue == "none":
            return self
        return replace(self, epilogue="none", c=Operand("bf16") if self.in_blocks else self.c)

    @property
    def columns(self) -> int:
        """Columns of C."""
        return self.n // self.fold

    @property
    def kind(self) -> str:
        """``one`` product, ``batched`` (equal products side by side) or ``grouped`` (products of different M)."""
        return "grouped" if self.groups else "batched" if self.batch > 1 else "one"

    @property
    def masked(self) -> bool:
        """Whether each group has room for equally many rows in A and in C, of which it may use fewer."""
        return self.groups is not None and self.groups.room > 0

    @property
    def shared(self) -> str:
        """The operand that all products of a batch share, ``a`` or ``b``; "" where each has its own."""
        return "a" if self.a.shared else "b" if self.b.shared else ""

    @property
    def scalings(self) -> ScalePair:
        """The scale factors of A and of B."""
        return self.a.scaling, self.b.scaling

    @property
    def scales(self) -> str:
        """The name of `scalings` (`core.scaling.granularity`); "" of those that such types usually have."""
        return unusual_granularity(self.scalings, self.a.type)

    @cached_property
    def operands(self) -> dict[str, OperandSpec]:
        """The operands of a kernel by name: a, b, c, then scale_a, scale_b, bias, offsets or counts, if any."""
        m, n, k = self.rows, self.n, self.k
        batch = {name: 0 if self.batch == 1 or self.shared == name else self.batch for name in "abc"}
        each = (self.group_count,) if self.groups else ()
        within = (self.group_count, self.group_m) if self.masked else (m,)
        of_c = (m + rows_of_factors(m),) if self.in_blocks else within
        specs = [
            OperandSpec(name, one.type, shape, _order(one), batch=batch[name])
            for name, one, shape in (
                ("a", self.a, (*within, k)), ("b", self.b, (*each, k, n)), ("c", self.c, (*of_c, self.columns))
            )
        ]  # fmt: skip
        for name, scaling, rows in (("scale_a", self.a.scaling, m), ("scale_b", self.b.scaling, n)):
            if scaling is not None:
                shape = scaling.stored(rows, k)
                if scaling.applied == "epilogue" and name == "scale_b":
                    shape = shape[:1]  # so that it broadcasts over the columns of C
                    shape = (self.group_count * shape[0],)  # those of all groups one after another
                elif each and (name == "scale_b" or (self.masked and scaling.layout == "groups")):
                    shape = (*each, *scaling.stored(self.group_m if name == "scale_a" else rows, k))
                where = scaling.layout, scaling.applied, scaling, batch[name[-1]]
                specs.append(OperandSpec(name, DTYPES[scaling.dtype], shape, *where))
        if self.bias != "none":
            shape = (m, 1) if self.bias == "m" else (n,)
            specs.append(OperandSpec("bias", self.bias_dtype, shape, "rows", "epilogue", batch=batch["c"]))
        if self.epilogue == RESIDUAL:
            specs.append(OperandSpec("bias", self.bias_dtype, (m, n), "rows", "epilogue", batch=batch["c"]))
        if each:
            specs.append(OperandSpec(self.group_operand, DTYPES["int32"], each, "rows", "groups"))
        return {spec.name: spec for spec in specs}

    @cached_property
    def extras(self) -> tuple[OperandSpec, ...]:
        """The operands besides A, B and C, with those of the epilogue in the order in which it applies them."""
        return tuple(self.operands.values())[3:]

    @property
    def leads(self) -> tuple[int, int, int]:
        """Elements between the stored rows or columns of A, of B and of C, if these are contiguous."""
        return self.k if self.a.row_major else self.m, self.n if self.b.row_major else self.k, self.columns

    @property
    def rows(self) -> int:
        """Rows of A and of C in memory: M, or in the masked form also the unused ones."""
        return self.group_count * self.group_m if self.masked else self.m

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """The rows of each group in tuning; all of one product."""
        return self.groups.row_counts(self.m) if self.groups else (self.m,)

    @property
    def group_count(self) -> int:
        """Number of groups; 1 of one product."""
        return self.groups.count if self.groups else 1

    @property
    def group_m(self) -> int:
        """M of one group where all have room for equally many rows; M of all others."""
        return self.groups.room if self.groups and self.groups.room else self.m

    @property
    def group_operand(self) -> str:
        """The operand that assigns rows to groups: ``offsets``, ends of groups, or of the masked form ``counts``."""
        return "counts" if self.masked else "offsets"

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """The values of `group_operand` in tuning."""
        return self.row_counts if self.masked else group_ends(self.row_counts)

    def at(self, m: int) -> Problem:
        """Return the same product at another M; where each group has equal room, at that number of rows a group.

        Groups whose rows were captured have skewed ones then.
        """
        groups = self.groups
        if groups is None:
            return self if m == self.m else self._with(m=check_size("M", m))
        if groups.room:
            plain = replace(groups, room=m, spread="uniform", counts=())
            return replace(self, m=min(self.m, groups.count * m), groups=plain)
        return replace(self, m=m, groups=replace(groups, spread="skewed", counts=()) if groups.counts else groups)

    def spread_as(self, other: Problem) -> Problem:
        """This product with its rows spread over the groups in proportion to the captured counts of another M."""
        if self.groups is None or other.groups is None:
            return self
        counts = apportion(self.m, other.groups.counts)
        return replace(self, groups=replace(self.groups, spread="captured", counts=counts))

    def stored(self, row_major_a: bool, row_major_b: bool) -> Problem:
        """Return the same product of an A and a B that are stored in rows or in columns."""
        return self._with(a=self.a._replace(row_major=row_major_a), b=self.b._replace(row_major=row_major_b))

    def scaled(self, pair: ScalePair) -> Problem:
        """Return the same product with these scale factors of A and of B."""
        return self._with(a=self.a._replace(scaling=pair[0]), b=self.b._replace(scaling=pair[1]))

    def _with(self, **values: Any) -> Problem:
        """Return the same product with values that need no check: a call of a new M makes dozens."""
        made = object.__new__(Problem)
        vars(made).update({name: vars(self)[name] for name in self.__dataclass_fields__}, **values)
        return made

    @property
    def scale_depth(self) -> int:
        """Elements along K after which a scale factor changes; 0 where none changes along K."""
        return min((s.depth for s in self.scalings if s is not None and s.depth), default=0)

    @property
    def microscaled(self) -> bool:
        """Whether A and B are of one width and have powers of two along K (OCP MX), which matrix units may apply."""
        powers = all(s is not None and s.dtype == "e8m0" and s.depth for s in self.scalings)
        return powers and self.a.type.packed == self.b.type.packed

    @property
    def bias_dtype(self) -> DType:
        """C's dtype, or the narrowest sensible one where C is eight bits wide."""
        narrow = {"int8": DTYPES["int32"]}.get(self.c.dtype, DTYPES["fp16"])
        return narrow if self.c.type.bytes == 1 else self.c.type

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: A, B, scales and the bias read once, C written once."""
        added = {"none": 0, "m": self.m, "n": self.n}[self.bias] + (self.m * self.n) * (self.epilogue == RESIDUAL)
        bias = added * self.bias_dtype.bytes
        of_a, of_b = self.a.type, self.b.type
        a, b = self.m * self.k * of_a.bytes // of_a.packed, self.k * self.n * of_b.bytes // of_b.packed
        c = self.m * self.columns * self.c.type.bytes
        used = sum(rows > 0 for rows in self.row_counts)
        b *= used
        once = {"": 0, "a": a, "b": b}[self.shared]
        factors = {e.name: e.count * e.dtype.bytes for e in self.extras if e.scaling is not None}
        scales = factors.pop("scale_b", 0) * used // self.group_count + sum(factors.values())
        return self.batch * (a + b + c + bias - once) + once + scales

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that A, B, C and a bias take; of groups without rows too, which nothing reads."""
        if self.groups is None:
            return self.bytes
        return sum(s.count * s.dtype.bytes // s.dtype.packed for s in self.operands.values())

    @property
    def layout(self) -> str:
        """BLAS letters of A and B as tune_gemm writes them: T is row-major, N column-major."""
        return ("T" if self.a.row_major else "N") + ("T" if self.b.row_major else "N")

    @property
    def dtypes(self) -> str:
        """The three dtypes, shortened when they agree."""
        names = (self.a.dtype, self.b.dtype, self.c.dtype)
        return names[0] if len(set(names)) == 1 else "-".join(names)

    @property
    def product(self) -> str:
        """The product without its M, as tables over M name it."""
        bias = "" if self.bias == "none" else f", bias {self.bias}"
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        shared = f" that share {self.shared.upper()}" if self.shared else ""
        after = "" if self.epilogue == "none" else f", {self.epilogue}"
        return f"N {self.n}, K {self.k}, {self.dtypes} {self.layout}{bias}{batch}{shared}{after}"

    @property
    def key(self) -> str:
        """Identity as text, e.g. ``16x16x16_fp16_TT``; equal keys are equal problems."""
        parts = [f"{self.m}x{self.n}x{self.k}", self.dtypes, self.layout]
        parts += [f"bias{self.bias}"] if self.bias != "none" else []
        parts += [f"batch{self.batch}"] if self.batch != 1 else []
        parts += [f"shared{shared}"] if (shared := self.shared) else []
        if groups := self.groups:
            parts += [f"groups{groups.count}"]
            parts += [f"room{groups.room}"] if groups.room else []
            parts += [groups.spread + _digest(groups.counts)] if groups.spread != "uniform" else []
        parts += [self.family] if self.family != DEFAULT_FAMILY else []
        parts += [scales] if (scales := self.scales) else []
        parts += [self.b.order] if self.b.order != PLAIN else []
        parts += [self.epilogue] if self.epilogue != "none" else []
        return "_".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; those after ``family`` only where they are not at their defaults."""
        a, b, c, groups = self.a, self.b, self.c, self.groups
        data = {
            "m": self.m, "n": self.n, "k": self.k, "dtype_a": a.dtype, "dtype_b": b.dtype, "dtype_c": c.dtype,
            "row_major_a": a.row_major, "row_major_b": b.row_major, "bias": self.bias, "batch": self.batch,
            "family": self.family,
        }  # fmt: skip
        more: dict[str, Any] = {} if b.order == PLAIN else {"order_b": b.order}
        more |= {f"scale_{name}": one.scaling.to_json() for name, one in (("a", a), ("b", b)) if one.scaling}
        more |= groups.to_json() if groups else {}
        more |= {"scales": self.scales, "shared": self.shared}
        more |= {"epilogue": self.epilogue} if self.epilogue != "none" else {}
        return data | {key: value for key, value in more.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Return what `to_json` was called on; fields that came later are at their defaults where the data has none.

        Raises:
            InputError: a value is not of its field's kind, or out of range.
            KeyError, TypeError: a field is missing or of another type.
        """
        require(data, _KINDS)
        own = {name: data[name] for name in ("bias", "batch", "family", "epilogue") if name in data}
        of_a, of_b = (Scaling.from_json(data[key]) if data.get(key) else None for key in ("scale_a", "scale_b"))
        types, shared = (data.get(f"dtype_{name}", "fp16") for name in "abc"), data.get("shared")
        type_a, type_b, type_c = types
        a = Operand(type_a, data.get("row_major_a", True), PLAIN, of_a, shared == "a")
        b = Operand(type_b, data.get("row_major_b", True), data.get("order_b", PLAIN), of_b, shared == "b")
        groups = Groups.from_json(data)
        return cls(data["m"], data["n"], data["k"], a, b, Operand(type_c), **own, groups=groups)


def _order(operand: Operand) -> str:
    """Return the memory layout of an operand: that of a plug-in, ``rows`` or ``columns``."""
    return operand.order if operand.order != PLAIN else "rows" if operand.row_major else "columns"


def _digest(counts: tuple[int, ...]) -> str:
    """Return a few letters that distinguish counts; "" of none."""
    return hashlib.sha256(",".join(map(str, counts)).encode()).hexdigest()[:8] if counts else ""


JSON_KEYS = (
    "m", "n", "k", "dtype_a", "dtype_b", "dtype_c", "row_major_a", "row_major_b", "bias", "batch", "family", "order_b",
    "scale_a", "scale_b", "groups", "group_form", "spread", "counts", "room", "scales", "shared",
    "epilogue",
)  # fmt: skip
# What `Problem` itself does not check: it checks the range of a size and the names of dtypes and biases.
_TEXTS = ("dtype_a", "dtype_b", "dtype_c", "bias", "family", "epilogue", "order_b", "scales", "group_form", "spread")
_KINDS = dict.fromkeys(("row_major_a", "row_major_b"), FLAG) | dict.fromkeys(_TEXTS, TEXT)
_KINDS |= dict.fromkeys(("scale_a", "scale_b"), FieldKind("a map or null", lambda v: v is None or MAP.holds(v)))
_KINDS |= {"shared": one_of("", "a", "b"), "room": NATURAL}
_KINDS |= {"counts": FieldKind("a list", lambda v: isinstance(v, list | tuple))}
