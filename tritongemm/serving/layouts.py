"""Public calls that convert scale factors and weights to the orders that kernels read, and back."""

import torch
from torch import Tensor

from tritongemm.core.dtypes import E8M0_BIAS
from tritongemm.core.errors import InputError
from tritongemm.core.integers import round_up
from tritongemm.core.problem import Problem, matrices
from tritongemm.operations.checks import check_tensors
from tritongemm.operations.factors import EXPONENTS
from tritongemm.operations.quantisation import FACTOR_LAYOUTS, empty_in
from tritongemm.operations.scaled_operands import dtype_name
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout, WeightLayout


def pack_scales(scales: Tensor, layout: str = "e8m0_32x8") -> Tensor:
    """Return scale factors in an order that kernels read, padded with ones.

    Args:
        scales: [rows, groups along K], bytes or e8m0; or float32.
        layout: a plug-in of numerics/scale_layouts; ``e8m0_32x8`` is AITER's ``e8m0_shuffle``. Of float32 factors the
            order of the factors, as of `tritongemm.quantize`: ``rows``, ``groups`` or ``tma``.

    Returns:
        Factors of the same type, dense, rows and groups padded to complete blocks of the layout; those of float32 have
        the same shape, and strides that show the layout.

    Raises:
        TypeError: they are no tensor.
        InputError: no such layout, or no such factors.

    Examples:
        >>> _, scales = tritongemm.quantize(torch.randn(4, 256), "mx")
        >>> scales.shape, tritongemm.pack_scales(scales).shape
        (torch.Size([4, 8]), torch.Size([32, 8]))
    """
    if layout in FACTOR_LAYOUTS:
        _check_floats(scales, layout)
        return empty_in(layout, scales.shape[0], scales.shape[1], scales.device).copy_(scales)
    order = registry.get(ScaleLayout, layout)
    exponents = _exponents(scales)
    (rows, groups), (of_rows, of_groups) = scales.shape, order.pad
    padded = torch.nn.functional.pad(exponents, (0, -groups % of_groups, 0, -rows % of_rows), value=E8M0_BIAS)
    return order.pack(padded).contiguous().view(scales.dtype)


def unpack_scales(scales: Tensor, rows: int, groups: int, layout: str = "e8m0_32x8") -> Tensor:
    """Return what `pack_scales` was given.

    Args:
        scales: in the order of a layout.
        rows: without padding.
        groups: the same along K.
        layout: as of `pack_scales`.

    Raises:
        TypeError: they are no tensor.
        InputError: no such layout, or factors with another number of rows and groups, or not in complete blocks.

    Examples:
        >>> packed = tritongemm.pack_scales(torch.ones(4, 8, dtype=torch.uint8))
        >>> tritongemm.unpack_scales(packed, 4, 8).shape
        torch.Size([4, 8])
    """
    if layout in FACTOR_LAYOUTS:
        _check_floats(scales, layout)
        if tuple(scales.shape) != (rows, groups):
            raise InputError(f"scales are {tuple(scales.shape)}, not {rows} x {groups}")
        return scales.contiguous()
    order = registry.get(ScaleLayout, layout)
    exponents = _exponents(scales)
    wanted = tuple(round_up(size, multiple) for size, multiple in zip((rows, groups), order.pad, strict=True))
    if tuple(scales.shape) != wanted:
        raise InputError(f"scales are {tuple(scales.shape)}; {rows} x {groups} in the order {layout} are {wanted}")
    return order.unpack(exponents)[:rows, :groups].contiguous().view(scales.dtype)


def pack_weight(w: Tensor, order: str = "shuffled_16x16") -> Tensor:
    """Return a weight [N, K] in an order that kernels read: give it to `scaled_mm` with ``order_b``.

    Args:
        w: [N, K]; of fp4 [N, K / 2] bytes.
        order: a plug-in of numerics/weight_layouts; ``shuffled_16x16`` is AITER's ``shuffle_weight``.

    Raises:
        InputError: no such order, or a weight that does not divide into its blocks.

    Examples:
        >>> w = torch.randn(16, 64)
        >>> torch.equal(tritongemm.unpack_weight(tritongemm.pack_weight(w)), w)
        True
    """
    return _checked(w, order).pack(w.t()).t()


def unpack_weight(w: Tensor, order: str = "shuffled_16x16") -> Tensor:
    """Return what `pack_weight` was given; arguments and errors as for that.

    Examples:
        >>> packed = tritongemm.pack_weight(torch.ones(16, 64))
        >>> tritongemm.unpack_weight(packed).shape
        torch.Size([16, 64])
    """
    return _checked(w, order).unpack(w.t()).t()


def _checked(w: Tensor, order: str) -> WeightLayout:
    """Return the layout, which has a place for all elements of a weight."""
    layout = registry.get(WeightLayout, order)
    check_tensors({"w": w})
    if w.dim() != 2 or not w.numel() or not w.is_contiguous():
        raise InputError(f"w is {tuple(w.shape)} with strides {w.stride()}; a weight is [N, K], dense and row-major")
    dtype = dtype_name("w", w)
    k = w.shape[1] * (2 if dtype == "fp4e2m1" else 1)
    sizes, wide = (1, w.shape[0], k), {"fp4e2m1": "bf16"}.get(dtype, dtype)  # beside a wider A too
    as_problems = (Problem(*sizes, *matrices(a, dtype, "fp16", layout="TN", order=order)) for a in (dtype, wide))
    possible, beside_wider = map(layout.supports, as_problems)
    if not (possible or beside_wider):
        raise InputError(f"w is {w.dtype} {tuple(w.shape)}: {possible}")
    return layout


def _check_floats(scales: Tensor, layout: str) -> None:
    """Refuse what is no tensor of float32 factors."""
    check_tensors({"scales": scales})
    if scales.dtype != torch.float32 or scales.dim() != 2 or not scales.numel():
        raise InputError(
            f"scales are {scales.dtype} {tuple(scales.shape)}; in the layout {layout} they are float32 [rows, groups]"
        )


def _exponents(scales: Tensor) -> Tensor:
    check_tensors({"scales": scales})
    if scales.dtype not in EXPONENTS or scales.dim() != 2 or not scales.numel():
        raise InputError(f"scales are {scales.dtype} {tuple(scales.shape)}; they are e8m0 [rows, groups along K]")
    return scales.contiguous().view(torch.uint8)
