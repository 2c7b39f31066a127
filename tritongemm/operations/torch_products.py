"""What PyTorch computes for a call of `tritongemm.mm`, wherever no tuned kernel fits.

PyTorch's linear layer is bound when this is imported, since `tritongemm.serve` puts another function in its place.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.operations.torch_limits import takes_fp8, takes_int8

DTYPE_NAMES = {getattr(torch, d.torch): d.name for d in DTYPES.values() if hasattr(torch, d.torch)}
_FP8 = frozenset(t for t, name in DTYPE_NAMES.items() if DTYPES[name].is_fp8)
_NARROW = _FP8 | {torch.int8}
torch_linear = functional.linear
_read_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # It exists since PyTorch 2.9.


def output_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of the result: as asked for, else x's; fp16 of fp8 and int32 of int8 operands, as tuned."""
    if out_dtype is not None:
        return out_dtype
    return torch.float16 if x.dtype in _FP8 else torch.int32 if x.dtype == torch.int8 else x.dtype


def is_plain(x: Tensor, w: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Return whether ``torch.nn.functional.linear`` takes these dtypes and gives the one asked for."""
    return x.dtype == w.dtype and out_dtype in (None, x.dtype) and x.dtype not in _NARROW


def wide_dtype(x: Tensor, w: Tensor, wanted: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch computes what it has no product for.

    Integers go through float64, which holds every sum of int8 products exactly.

    Raises:
        InputError: complex numbers, or integers by fractions for an integer result: it would be cut.
    """
    cut = w.dtype.is_floating_point and not x.dtype.is_floating_point and not wanted.is_floating_point
    if cut or x.dtype.is_complex or w.dtype.is_complex:
        raise InputError(
            f"the operands are {x.dtype} and {w.dtype}, the result {wanted}; convert them to one type first"
        )
    if not x.dtype.is_floating_point:
        return torch.float64
    return torch.float32 if wanted in _FP8 else torch.promote_types(torch.float32, wanted)


def converted(product: Tensor, wanted: torch.dtype) -> Tensor:
    """Return a product in the dtype of the result; what eight bits can't hold becomes their largest number.

    Sums beyond int32 go round, as theirs do.
    """
    if wanted in _NARROW:
        limits = torch.iinfo(wanted) if wanted == torch.int8 else torch.finfo(wanted)
        product = product.clamp(limits.min, limits.max)
    if wanted == torch.int32:
        product = product.long()  # PyTorch's own conversion from floats to int32 gives any number beyond its limits
    return product.to(wanted)


def float32_precision() -> str:
    """Return how PyTorch is set to multiply float32 on a GPU: ``fp32``, in full, or ``tf32``."""
    if _read_precision is None:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return "tf32" if _read_precision("cuda", "matmul") == "tf32" else "fp32"


def linear(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return x @ w.T (+ bias) by PyTorch.

    Args:
        x: [..., K], any strides.
        w: [N, K], any strides.
        bias: [N] or None.
        out_dtype: see `output_dtype`; a wider one is accumulated and stored without rounding in between.

    Raises:
        InputError: types without a product; names them.
    """
    if is_plain(x, w, out_dtype):
        return torch_linear(x, w, bias)
    wanted = output_dtype(x, out_dtype)
    if x.dim() > 1 and w.dim() == 2 and not x.is_nested and x.shape[-1]:
        product = _mixed_product(x.reshape(-1, x.shape[-1]), w, bias, wanted)
        if product is not None:
            return product.view(*x.shape[:-1], w.shape[0])
    wide = wide_dtype(x, w, wanted)
    summand = None if bias is None else bias.to(wide)
    return converted(torch_linear(x.to(wide), w.to(wide), summand), wanted)


def _mixed_product(x: Tensor, w: Tensor, bias: Tensor | None, wanted: torch.dtype) -> Tensor | None:
    """Return x [M, K] @ w [N, K].T by a function of PyTorch that takes these dtypes; None where there is none."""
    if not x.is_cuda or x.dtype != w.dtype:
        return None
    n, k = w.shape
    if x.dtype in _FP8 and wanted not in _FP8 and takes_fp8(n, k) and w.is_contiguous():
        one = torch.ones((), device=x.device)
        row = None if bias is None else bias.to(torch.bfloat16 if wanted == torch.float32 else wanted)
        return torch._scaled_mm(x.contiguous(), w.t(), one, one, bias=row, out_dtype=wanted)
    if x.dtype == torch.int8 and wanted == torch.int32 and bias is None and takes_int8(x.shape[0], n, k):
        return torch._int_mm(x.contiguous(), w.t())
    if x.dtype in (torch.float16, torch.bfloat16) and wanted == torch.float32 and hasattr(torch.ops.aten.mm, "dtype"):
        product: Tensor = torch.ops.aten.mm.dtype(x, w.t(), wanted)
        return product if bias is None else product.add_(bias)
    return None
