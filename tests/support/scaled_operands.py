"""Problems with scale factors of every granularity, operands with outliers, and what they multiply to in float64."""

import torch

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.scaling import Scaling

TENSOR, ROW = Scaling(rows=0), Scaling()
VECTOR, GROUPS, SQUARE = Scaling(depth=128), Scaling(depth=128, layout="groups"), Scaling(rows=128, depth=128)
PAIRS = {
    "tensor": (TENSOR, TENSOR),
    "row": (ROW, ROW),
    "block, A in groups": (GROUPS, SQUARE),
    "block, A in rows": (VECTOR, SQUARE),
    "block, A padded": (GROUPS._replace(pad=(4, 1)), SQUARE),
    "group, B in groups": (GROUPS, GROUPS),
    "group, B in rows": (VECTOR, VECTOR),
}


def problem(
    m: int,
    n: int,
    k: int,
    pair: tuple[Scaling, Scaling],
    dtype: str = "fp8e4m3fn",
    dtype_c: str = "bf16",
    bias: str = "none",
) -> Problem:
    """x [M, K] @ w[N, K].T with a pair of scalings; its family's name stands for the pairs that it can have."""
    family = "a8w8_blockscale" if pair[0].depth else "a8w8"
    return Problem(m, n, k, *matrices(dtype, c=dtype_c, layout="TN"), bias=bias, family=family).scaled(pair)


def operands(of: Problem, device: str = "cpu", seed: int = 0) -> tuple[Operands, torch.Tensor]:
    """A, B, C (NaN), factors up to 2**11 and down to 2**-11, a bias, and C in float64.

    Along K the factors of A rise where those of B fall, so that each group adds as much as another: a factor in another
    one's place shows.
    """
    generator = torch.Generator().manual_seed(seed)
    assert of.a.scaling is not None and of.b.scaling is not None
    powers = torch.randint(-10, 11, (-(-of.k // (of.a.scaling.depth or of.k)),), generator=generator).float()
    left, factors_a = _quantised(of.m, of.k, of.a.scaling, of.a.dtype, powers, generator)
    right, factors_b = _quantised(of.n, of.k, of.b.scaling, of.b.dtype, -powers, generator)
    exact = (left.double() * _spread(factors_a, of.a.scaling, of.m, of.k)) @ (
        right.double() * _spread(factors_b, of.b.scaling, of.n, of.k)
    ).T
    made = {
        "a": left,
        "b": right.T,
        "scale_a": _arranged(factors_a, of.a.scaling),
        "scale_b": _arranged(factors_b, of.b.scaling),
        "c": torch.full((of.m, of.n), float("nan")).to(getattr(torch, of.c.type.torch)),
    }
    if of.bias != "none":
        bias = torch.randn(of.m if of.bias == "m" else of.n, generator=generator) * exact.std()
        made["bias"] = bias.to(getattr(torch, of.bias_dtype.torch))
        exact += made["bias"].double()[:, None] if of.bias == "m" else made["bias"].double()
    return {name: tensor.to(device) for name, tensor in made.items()}, exact.to(device)


def _quantised(
    rows: int, k: int, scaling: Scaling, dtype: str, powers: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [rows, K] of a narrow type and their factors [rows, groups], near two to the `powers` of the groups."""
    shape = scaling._replace(layout="rows", pad=(1, 1)).shape(rows, k)
    factors = (torch.rand(shape, generator=generator) + 0.5) * powers.exp2()
    numbers = torch.randn(rows, k, generator=generator)
    if dtype == "int8":
        return (numbers * 40).clamp(-127, 127).to(torch.int8), factors
    return numbers.to(getattr(torch, DTYPES[dtype].torch)), factors


def _spread(factors: torch.Tensor, scaling: Scaling, rows: int, k: int) -> torch.Tensor:
    """Factors [rows, groups] as [rows, K] in float64."""
    down, along = scaling.rows or rows, scaling.depth or k
    return factors.double().repeat_interleave(down, 0)[:rows].repeat_interleave(along, 1)[:, :k]


def _arranged(factors: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Factors [rows, groups] as the scaling has them in memory; those that an epilogue applies are flat."""
    if not scaling.depth:
        return factors.reshape(-1).contiguous()
    padded = torch.nn.functional.pad(
        factors, (0, -factors.shape[1] % scaling.pad[1], 0, -factors.shape[0] % scaling.pad[0])
    )
    return (padded.T if scaling.layout == "groups" else padded).contiguous()
