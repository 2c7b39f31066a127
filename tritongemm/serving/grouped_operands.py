"""What a call of `grouped_mm` asks for: its operands, checked, as a problem and as kernels read them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import Scaling, granularity
from tritongemm.core.support import Support
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.operand_checks import check_eight_bits, check_fit, check_tensors, check_unmapped, read_integers
from tritongemm.serving.scale_factors import EXPONENTS, MX_GROUP
from tritongemm.serving.torch_fallback import DTYPE_NAMES

DEPTH = 128  # elements along K, and columns of a weight, that share a factor of a block


class GroupedOperands(NamedTuple):
    """The arguments of `grouped_mm`."""

    a: Tensor
    b: Tensor
    offs: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    out_dtype: torch.dtype
    scale_layout: str = ""

    @property
    def masked(self) -> bool:
        """Whether every group has room for equally many rows."""
        return bool(self.a.dim() == 3)

    @property
    def granularity(self) -> str:
        """What a scale factor covers: ``row``, ``block``, ``mx`` (32 elements along K), or "" where there are none."""
        if self.scale_b is None:
            return ""
        if self.scale_b.dtype in EXPONENTS:
            return "mx"
        return "row" if self.scale_b.dim() == 2 else "block"

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Our names of the types of a, b and the result, "" of those that we have none for; bytes of MX are fp4."""
        a, b = (DTYPE_NAMES.get(t.dtype, "") for t in (self.a, self.b))
        if self.granularity == "mx" and self.a.dtype == self.b.dtype == torch.uint8:
            a = b = "fp4e2m1"
        return a, b, DTYPE_NAMES.get(self.out_dtype, "")

    @property
    def k(self) -> int:
        """Elements along K, of which several may share a byte."""
        name = self.dtypes[0]
        return int(self.a.shape[-1]) * (DTYPES[name].packed if name else 1)

    @property
    def powers(self) -> tuple[Family, Scaling]:
        """The family of a product with a power of two for each 32 elements along K, and how they lie.

        Raises:
            InputError: no family has such a product.
        """
        family = registry.get(Family, "a4w4_blockscale" if self.dtypes[0] == "fp4e2m1" else "a8w8_blockscale")
        layout = self.scale_layout or "rows"
        for scaling, _ in family.scalings(*self.dtypes[:2]):
            if scaling is not None and (scaling.dtype, scaling.layout) == ("e8m0", layout):
                return family, scaling
        raise InputError(f"{self.a.dtype} has no factors for {MX_GROUP} elements along K in the layout {layout}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All operands by their names."""
        scales = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        found = {"a": self.a, "b": self.b, "offs": self.offs}
        return found | {name: tensor for name, tensor in scales.items() if tensor is not None}


def check(operands: GroupedOperands) -> None:
    """Refuse operands that do not belong together, by their shapes, types and devices; no GPU is waited for.

    Raises:
        InputError: names the operand and what it must be.
        TypeError: an operand is no tensor.
    """
    a, b, offs, scale_a, scale_b, out_dtype, _ = operands
    check_tensors(operands.tensors)
    check_unmapped("grouped_mm", operands.tensors)
    check_extents(a, b)
    if not b.numel() or not a.shape[-1]:
        raise InputError(f"b {tuple(b.shape)} is empty: there is nothing to multiply by")
    if tuple(offs.shape) != (b.shape[0],) or offs.dtype != torch.int32:
        raise InputError(
            f"offs must be int32 ({b.shape[0]},), a number for each group; it is {offs.dtype} {tuple(offs.shape)}"
        )
    if (scale_a is None) != (scale_b is None):
        raise InputError("scale_a and scale_b belong together; give both or neither")
    if operands.scale_layout and operands.granularity != "mx":
        raise InputError(f"scale_layout is {operands.scale_layout!r}; it is of factors that are powers of two (e8m0)")
    if not all(operands.dtypes):
        raise InputError(f"there is no product of {a.dtype} and {b.dtype} in {out_dtype}")
    if scale_a is None and a.dtype != b.dtype:
        raise InputError(f"a is {a.dtype}, b is {b.dtype}: without scale factors they are of one type")
    if scale_a is not None and scale_b is not None:
        _check_scales(operands, scale_a, scale_b)
        if operands.dtypes[:2] != ("fp4e2m1", "fp4e2m1"):
            check_eight_bits(a, b, out_dtype)
    if not (a.is_cuda or a.is_meta):
        _check_rows(operands)


def check_extents(a: Tensor, b: Tensor) -> None:
    """Refuse operands that are no rows, or groups of rows, and a matrix for each group, with one K.

    Raises:
        InputError: says what they are.
    """
    masked = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]
    fit = b.dim() == 3 and (a.dim() == 2 or masked) and a.shape[-1] == b.shape[1]
    check_fit(fit, "[M, K] or [groups, rows, K], and [groups, K, N]", a=a, b=b)


def _check_scales(operands: GroupedOperands, scale_a: Tensor, scale_b: Tensor) -> None:
    rows, (groups, _, n), k = operands.a.shape[:-1], operands.b.shape, operands.k
    of_a: list[tuple[int, ...]]
    of_b: tuple[int, ...]
    kinds: tuple[torch.dtype, ...] = (torch.float32,)
    if operands.granularity == "mx":
        _, scaling = operands.powers
        whole = scaling.shape(prod(rows), k)
        of_a = [whole] if operands.scale_layout else [(*rows, whole[1]), whole]
        of_b, kinds = (groups, *scaling.shape(n, k)), EXPONENTS
    elif operands.granularity == "row":
        of_a, of_b = [(*rows,), (*rows, 1)], (groups, n)
    else:
        blocks = cdiv(k, DEPTH)
        of_a, of_b = [(*rows, blocks)], (groups, cdiv(n, DEPTH), blocks)
    for name, scale, shapes in (("scale_b", scale_b, [of_b]), ("scale_a", scale_a, of_a)):
        if tuple(scale.shape) not in shapes or scale.dtype not in kinds:
            kind = "float32" if torch.float32 in kinds else "e8m0"
            raise InputError(f"{name} must be {kind} {shapes[0]}, not {scale.dtype} {tuple(scale.shape)}")


def _check_rows(operands: GroupedOperands) -> None:
    """Refuse groups that do not add up, which a CPU can tell without waiting."""
    numbers, a = read_integers(operands.offs), operands.a
    if operands.masked:
        if any(not 0 <= rows <= a.shape[1] for rows in numbers):
            raise InputError(f"offs must be the rows of each group, 0 to {a.shape[1]}; it is {numbers}")
    elif any(low > high for low, high in zip([0, *numbers], numbers, strict=False)) or numbers[-1] > a.shape[0]:
        raise InputError(f"offs must be the ends of groups, ascending up to {a.shape[0]}; it is {numbers}")


def problem_of(operands: GroupedOperands) -> Problem | Support:
    """The problem of a call with its rows spread evenly, or why no kernel could compute it."""
    a, b = operands.a, operands.b
    (groups, _, n), k = b.shape, operands.k
    if groups < 2 or not a.numel() or not b.numel():
        return Support(f"{groups} groups, a {tuple(a.shape)}: there is no grouped product of these")
    if not a.is_contiguous():
        return Support(f"a has strides {a.stride()}; kernels take dense rows")
    if not (b.is_contiguous() or b.mT.is_contiguous()):
        return Support(f"b has strides {b.stride()}; kernels take dense weights")
    scales = ""
    if operands.granularity == "mx":
        family, scaling = operands.powers
        scales = granularity((scaling, scaling))
    else:
        family = registry.get(Family, {"": "dense", "row": "a8w8", "block": "a8w8_blockscale"}[operands.granularity])
    form = {"group_form": "masked", "room": a.shape[1]} if operands.masked else {}
    try:
        made: Problem = family.problem(
            prod(a.shape[:-1]), n, k, *operands.dtypes, groups=groups, row_major_b=not b.mT.is_contiguous(),
            scales=scales, **form,
        )  # fmt: skip
    except InputError as error:
        return Support(str(error))
    return made


def as_kernels_read(operands: GroupedOperands) -> dict[str, Tensor]:
    """The operands by the names of a problem; scale factors of blocks of A lie with K first, as kernels read them.

    Factors whose strides are those already are not copied, and so are dense rows of groups.
    """
    rows = operands.offs.contiguous()
    found = {"a": operands.a, "b": operands.b, "counts" if operands.masked else "offsets": rows}
    if operands.scale_a is None or operands.scale_b is None:
        return found
    of_a = operands.scale_a
    if operands.granularity == "block":
        of_a = of_a.mT
    return found | {"scale_a": of_a.contiguous(), "scale_b": operands.scale_b.contiguous()}
