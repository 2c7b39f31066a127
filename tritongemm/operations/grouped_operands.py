"""The arguments of `grouped_mm`, what they mean, and which do not belong together."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.epilogues import EPILOGUES, IN_BLOCKS, RESIDUAL, is_gated, rows_of_factors
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Operand
from tritongemm.core.scaling import SCALED_BLOCK, ScalePair, Scaling
from tritongemm.operations import checks
from tritongemm.operations.factors import EXPONENTS, given_shape, of_groups, of_rows_beside, products_with
from tritongemm.operations.linear_w4 import ACTIVATIONS, QUANTISED, read_weight
from tritongemm.operations.torch_products import DTYPE_NAMES, output_dtype

_BF16 = torch.bfloat16


class GroupedOperands(NamedTuple):
    """The arguments of `grouped_mm`."""

    a: Tensor
    b: Tensor
    offs: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_layout: str = ""
    order_b: str = PLAIN
    act: str = ""

    @property
    def is_of_four_bits(self) -> bool:
        """Whether two numbers of b share a byte, beside an a whose numbers are wider."""
        beside = self.scale_a is None or self.a.dtype in QUANTISED
        return beside and self.scale_b is not None and self.b.dtype == torch.uint8

    @property
    def weight(self) -> Operand | None:
        """What a weight of four bits is as a problem's B; None of other weights."""
        if not self.is_of_four_bits or self.scale_b is None or not (self.b.numel() and self.scale_b.dim() > 1):
            return None
        wide = self.a.dtype if self.scale_a is None else _BF16
        return read_weight(self.b[0].mT, self.scale_b[0], wide, self.order_b)

    @property
    def masked(self) -> bool:
        """Whether every group has room for equally many rows."""
        return bool(self.a.dim() == 3)

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result; of one in blocks that of a."""
        if self.act in IN_BLOCKS:
            return self.a.dtype
        if self.out_dtype is not None:
            return self.out_dtype
        if self.scale_a is not None:
            return _BF16
        return output_dtype(self.a, None) if self.scale_b is None else self.a.dtype if self.is_of_four_bits else _BF16

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; of one in blocks its rows, then their factors."""
        lead, n = self.a.shape[:-1], self.b.shape[2] // (2 if is_gated(self.act) else 1)
        return (*lead, n) if self.act not in IN_BLOCKS else (lead[0] + rows_of_factors(lead[0]), n)

    @property
    def scalings(self) -> ScalePair:
        """The scale factors of a and of b, as kernels read them."""
        if weight := self.weight:
            return of_rows_beside(self.scale_a, prod(self.a.shape[:-1]), weight.scaling)
        return of_groups(self.scale_b, self.scale_layout)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Our names of the types of a, b and the result, "" of those that we have none for; bytes of MX are fp4."""
        a, b = (DTYPE_NAMES.get(t.dtype, "") for t in (self.a, self.b))
        if self.scale_b is not None and self.a.dtype == self.b.dtype == torch.uint8 and self.scale_b.dtype in EXPONENTS:
            a = b = "fp4e2m1"
        if weight := self.weight:
            b = weight.dtype
        return a, b, DTYPE_NAMES.get(self.result_type, "")

    @property
    def k(self) -> int:
        """Elements along K, of which several may share a byte."""
        name = self.dtypes[0]
        return int(self.a.shape[-1]) * (DTYPES[name].packed if name else 1)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All operands by their names."""
        scales = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        found = {"a": self.a, "b": self.b, "offs": self.offs}
        return found | {name: tensor for name, tensor in scales.items() if tensor is not None}


def check_groups(operands: GroupedOperands) -> None:
    """Refuse operands that do not belong together, by their shapes, types and devices; no GPU is waited for."""
    a, b, offs, scale_a, scale_b = operands[:5]
    checks.check_tensors(operands.tensors)
    checks.check_unmapped("grouped_mm", operands.tensors)
    check_extents(operands)
    if not b.numel() or not a.shape[-1]:
        raise InputError(f"b {tuple(b.shape)} is empty: there is nothing to multiply by")
    if tuple(offs.shape) != (b.shape[0],) or offs.dtype != torch.int32:
        raise InputError(
            f"offs must be int32 ({b.shape[0]},), a number for each group; it is {offs.dtype} {tuple(offs.shape)}"
        )
    if (scale_a is None) != (scale_b is None) and not operands.is_of_four_bits:
        raise InputError("scale_a and scale_b belong together; give both or neither")
    if operands.is_of_four_bits:
        _check_four_bits(operands)
    elif operands.order_b != PLAIN:
        raise InputError(f"order_b is {operands.order_b!r}; it is of weights of four bits (uint8)")
    if operands.scale_layout and (scale_b is None or scale_b.dtype not in EXPONENTS):
        raise InputError(f"scale_layout is {operands.scale_layout!r}; it is of factors that are powers of two (e8m0)")
    _check_act(operands)
    if not all(operands.dtypes):
        raise InputError(f"there is no product of {a.dtype} and {b.dtype} in {operands.result_type}")
    if scale_b is None and a.dtype != b.dtype:
        raise InputError(f"a is {a.dtype}, b is {b.dtype}: without scale factors they are of one type")
    if scale_a is not None and scale_b is not None:
        _check_scales(operands, scale_a, scale_b)
        if operands.dtypes[:2] != ("fp4e2m1", "fp4e2m1") and not operands.is_of_four_bits:
            checks.check_eight_bits(a, b, operands._replace(act="").result_type)
    if not (a.is_cuda or a.is_meta):
        _check_rows(operands)


def _check_act(operands: GroupedOperands) -> None:
    """Refuse an activation that is none, and of gate and up a number of columns that is not of both."""
    act, (*_, n) = operands.act, operands.b.shape
    if not act:
        return
    if act not in EPILOGUES[1:] or act == RESIDUAL or operands.masked:
        known = ", ".join(name for name in EPILOGUES[1:] if name != RESIDUAL)
        raise InputError(f"act is {act!r}; of rows one after another it may be {known}")
    if is_gated(act) and n % 2:
        raise InputError(f"b has {n} columns; with {act} those of gate, then as many of up")
    if act in IN_BLOCKS and (operands.a.element_size() > 1 or operands.shape[1] % SCALED_BLOCK):
        columns = operands.shape[1]
        raise InputError(
            f"the result is {operands.a.dtype} of {columns} columns; blocks are of fp8, and of {SCALED_BLOCK}"
        )


def check_extents(operands: GroupedOperands) -> None:
    """Refuse operands that are no rows, or groups of rows, and a matrix for each group, with one K."""
    a, b, packed = operands.a, operands.b, 1 + operands.is_of_four_bits
    masked = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]
    fit = b.dim() == 3 and (a.dim() == 2 or masked) and a.shape[-1] == packed * b.shape[1]
    checks.check_fit(fit, f"[M, K] or [groups, rows, K], and [groups, K{' / 2' * (packed - 1)}, N]", a=a, b=b)


def _check_four_bits(operands: GroupedOperands) -> None:
    """Refuse weights of four bits whose bytes or factors are not those of each group, beside another type of a."""
    a, b, scale_b = operands.a, operands.b, operands.scale_b
    if operands.scale_a is None and a.dtype not in ACTIVATIONS:
        raise InputError(f"a is {a.dtype}; beside weights of four bits it is bfloat16 or float16, or has a scale_a")
    if not b.mT.is_contiguous():
        raise InputError(f"b has strides {b.stride()}; a weight of four bits is [groups, N, K / 2], passed as its mT")
    if scale_b is None or scale_b.dim() < 3 or scale_b.shape[0] != b.shape[0]:
        shape = None if scale_b is None else tuple(scale_b.shape)
        raise InputError(
            f"scale_b is {shape}; it has the factors of each of {b.shape[0]} groups, as linear_w4 takes them"
        )
    assert operands.weight is not None  # else it has raised


def _check_scales(operands: GroupedOperands, scale_a: Tensor, scale_b: Tensor) -> None:
    rows, (groups, _, n), k = operands.a.shape[:-1], operands.b.shape, operands.k
    of_a, of_b = operands.scalings
    assert of_a is not None and of_b is not None
    if not operands.is_of_four_bits:  # whose factors are checked with their weights
        if of_a.dtype == "e8m0" and not products_with(operands.dtypes[0], (of_a, of_b)):
            raise InputError(f"no family multiplies {operands.a.dtype} with powers of two for {of_a.depth} along K")
        check_factors("scale_b", scale_b, of_b, (groups,), (n, k))
    together = tuple(scale_a.shape) == given_shape(of_a, prod(rows), k)  # those of all rows, also of the masked form
    if operands.scale_layout or (together and of_a.dtype == "e8m0"):
        check_factors("scale_a", scale_a, of_a, (), (prod(rows), k))
    else:
        one_more = not of_a.depth and tuple(scale_a.shape) == (*rows, 1)
        check_factors("scale_a", scale_a.squeeze(-1) if one_more else scale_a, of_a, rows[:-1], (rows[-1], k))


def check_factors(name: str, scales: Tensor, scaling: Scaling, lead: tuple[int, ...], extents: tuple[int, int]) -> None:
    """Refuse factors of another type or shape than those of operands [*lead, *extents]; those of rows have no K.

    Raises:
        InputError: says what they must be.
    """
    wanted = (*lead, *given_shape(scaling, *extents)[: 2 if scaling.depth else 1])
    kinds = EXPONENTS if scaling.dtype == "e8m0" else (torch.float32,)
    if tuple(scales.shape) != wanted or scales.dtype not in kinds:
        kind = "e8m0" if scaling.dtype == "e8m0" else "float32"
        raise InputError(f"{name} must be {kind} {wanted}, not {scales.dtype} {tuple(scales.shape)}")


def _check_rows(operands: GroupedOperands) -> None:
    """Refuse groups that do not add up, which can be checked on a CPU without waiting."""
    numbers, a = checks.read_integers(operands.offs), operands.a
    if operands.masked:
        if any(not 0 <= rows <= a.shape[1] for rows in numbers):
            raise InputError(f"offs must be the rows of each group, 0 to {a.shape[1]}; it is {numbers}")
    elif any(low > high for low, high in zip([0, *numbers], numbers, strict=False)) or numbers[-1] > a.shape[0]:
        raise InputError(f"offs must be the ends of groups, ascending up to {a.shape[0]}; it is {numbers}")
