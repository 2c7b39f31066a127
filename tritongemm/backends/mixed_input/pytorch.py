"""PyTorch's product of bf16 by int4 (`_weight_int4pack_mm`), as a user calls it."""

from collections.abc import Callable

from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem

_DEPTH = 16  # elements along K of which a converted weight has 2, 4 or 8 together
_COLUMNS = 8


def product(problem: Problem, operands: Operands, weight: Tensor) -> Callable[[], Tensor]:
    """Return a call that computes C of bytes [N, K / 2].

    Raises:
        ValueError: PyTorch has no such product.
    """
    import torch

    scaling, a, given = problem.b.scaling, operands["a"], operands["scale_b"]
    together = next((each for each in (8, 4, 2) if problem.k % (each * _DEPTH) == 0), 0)
    if problem.a.dtype != "bf16" or problem.n % _COLUMNS or not together or scaling is None:
        raise ValueError("it multiplies bf16 by a weight of 8 columns and 32 elements along K at a time")
    factors, zeros = (given[:, 0], -given[:, 1]) if scaling.zeros else (given, torch.zeros_like(given))
    both = torch.stack((factors, zeros * factors), -1).contiguous()  # a number less 8 times its factor, plus the other
    if weight.is_cuda:  # the earlier number is in the high half of a byte there
        packed = torch._convert_weight_to_int4pack(weight << 4 | weight >> 4, together)
        return lambda: torch._weight_int4pack_mm(a, packed, scaling.depth, both)
    numbers, own = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).int(), torch.ops.aten
    packed = own._convert_weight_to_int4pack_for_cpu(numbers, together)
    return lambda: own._weight_int4pack_mm_for_cpu(a, packed, scaling.depth, both)
