"""Activations quantised with scale factors by PyTorch's operations, and memory for both."""

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.scaling import PADDED_ROWS, SCALED_BLOCK
from tritongemm.operations import microscaling
from tritongemm.operations.torch_products import DTYPE_NAMES

FACTOR_LAYOUTS = ("rows", "groups", "tma")  # of float32 factors of blocks
Quantised = tuple[Tensor, Tensor]  # activations and their factors


def empty_pair(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> Quantised:
    """Return the memory for the quantised activations and their factors."""
    if granularity == "mx":
        return microscaling.empty_pair(x.shape, dtype, layout, x.device)
    return torch.empty_like(x, dtype=dtype), empty_factors(x, granularity, layout)


def empty_factors(x: Tensor, granularity: str, layout: str) -> Tensor:
    """Allocate memory for the factors."""
    k = x.shape[-1]
    m = x.numel() // k
    if granularity != "block":
        rows = m if granularity == "row" else 1
        return torch.empty_strided((rows, 1), (1, 1), dtype=torch.float32, device=x.device)
    return empty_in(layout, m, cdiv(k, SCALED_BLOCK), x.device)


def empty_in(layout: str, rows: int, groups: int, device: torch.device) -> Tensor:
    """Allocate memory for float32 factors [rows, groups along K] in one of `FACTOR_LAYOUTS`."""
    if layout in ("rows", "groups"):  # one call of PyTorch, the one that takes the least time
        strides = (groups, 1) if layout == "rows" else (1, rows)
        return torch.empty_strided((rows, groups), strides, dtype=torch.float32, device=device)
    padded = round_up(rows, PADDED_ROWS)
    # There is memory for all that is padded.
    return torch.empty(groups * padded, dtype=torch.float32, device=device).as_strided((rows, groups), (1, padded))


def by_torch(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> Quantised:
    """Compute `quantize` with PyTorch operations."""
    if granularity == "mx":
        return microscaling.by_torch(x, dtype, layout)
    k = x.shape[-1]
    rows = x.detach().reshape(-1, k).float()
    maximum = DTYPES[DTYPE_NAMES[dtype]].maximum
    if granularity == "block":
        padded = torch.nn.functional.pad(rows, (0, -k % SCALED_BLOCK)).view(rows.shape[0], -1, SCALED_BLOCK)
    else:
        padded = rows.view(1, 1, -1) if granularity == "tensor" else rows.view(rows.shape[0], 1, k)
    largest = padded.abs().amax(-1, keepdim=True)
    # By a tensor: PyTorch's division by a number multiplies by its reciprocal on a GPU, which may be a bit off.
    unit = largest / torch.full_like(largest, maximum)
    factors = torch.where(largest == 0, 1.0, unit.clamp_min(torch.finfo(torch.float32).tiny))
    factors = torch.where(largest.isfinite(), factors, torch.nan)
    scaled = padded / factors if dtype == torch.int8 else padded * (torch.ones_like(factors) / factors)
    quotients = scaled.view(rows.shape[0], -1)[:, :k]
    q = quotients.round().to(dtype) if dtype == torch.int8 else quotients.to(dtype)
    out = empty_factors(x, granularity, layout)
    return q.reshape(x.shape), out.copy_(factors.squeeze(-1))
