"""Numbers with a power of two for each 32 along K (OCP MX), by PyTorch's operations, and memory for them.

A power is the largest absolute value that it covers over the largest number of the type, rounded up, so that no number
saturates. It is kept as e8m0: its exponent and 127; 127, which is one, where all numbers are zero, and 255, which is
NaN, where one is NaN or infinite.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES, E8M0_BIAS, E8M0_NAN, MANTISSA_BITS, Rounding
from tritongemm.core.scaling import MX_DEPTH
from tritongemm.operations.factors import powers
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout

INFINITE = 0x7F800000
_FP4 = "fp4e2m1"
# Of the absolute values where e2m1 rounds to the next of its numbers, those that themselves do, being ties, last.
ABOVE, FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
FORMATS = {torch.uint8: _FP4, **{t: name for t, name in DTYPE_NAMES.items() if name in (_FP4, "fp8e4m3fn", "fp8e5m2")}}


def layouts() -> tuple[str, ...]:
    """Return the layouts of the powers: in rows, or in an order of their own."""
    return "rows", *(layout.name for layout in registry.every(ScaleLayout))


def packed(w: Tensor) -> int:
    """Return the numbers that an element of a weight holds; bytes are fp4."""
    return DTYPES[FORMATS[w.dtype]].packed if w.dtype in FORMATS else 1


def empty_pair(extents: Sequence[int], dtype: torch.dtype, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the memory for activations [..., K] of these extents in a type, and for their powers."""
    *rows, k = extents
    q = torch.empty((*rows, k // DTYPES[FORMATS[dtype]].packed), dtype=dtype, device=device)
    return q, torch.empty(powers(layout).shape(prod(rows), k), dtype=torch.uint8, device=device)


def by_torch(x: Tensor, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """Return activations [..., K] in a type of `FORMATS` and powers in one of `layouts`, by PyTorch's operations."""
    k, rounding = x.shape[-1], Rounding.of(FORMATS[dtype])
    rows = x.detach().reshape(-1, k).float()
    high, wide = powers(layout).shape(rows.shape[0], k)
    padded = torch.nn.functional.pad(rows, (0, wide * MX_DEPTH - k, 0, high - rows.shape[0])).view(high, wide, MX_DEPTH)
    largest = padded.view(torch.int32).bitwise_and(2**31 - 1).amax(-1)  # a NaN's bits are above all numbers'
    exponents = ((largest + rounding.carry) >> MANTISSA_BITS) - rounding.less
    exponents = exponents.clamp_min(0).masked_fill(largest == 0, E8M0_BIAS).masked_fill(largest >= INFINITE, E8M0_NAN)
    inverse = ((2 * E8M0_BIAS - exponents).clamp_min(0) << MANTISSA_BITS).view(torch.float32)
    quotients = (padded * inverse[..., None]).view(high, -1)[: rows.shape[0], :k]
    q = _packed(quotients) if FORMATS[dtype] == _FP4 else quotients.to(dtype)
    found = exponents.to(torch.uint8)
    q = q.reshape(*x.shape[:-1], -1)
    packed = found if layout == "rows" else registry.get(ScaleLayout, layout).pack(found)
    return (q if q.dtype == dtype else q.view(dtype)), packed.contiguous()


def _packed(numbers: Tensor) -> Tensor:
    """Return [rows, K] rounded to e2m1, ties to even, two a byte, the earlier one in its low half."""
    size = numbers.abs()
    code = sum((size > step).byte() for step in ABOVE) + sum((size >= step).byte() for step in FROM)
    code = code | (numbers.signbit().byte() << 3)
    return code[:, ::2] | code[:, 1::2] << 4
