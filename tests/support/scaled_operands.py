import torch

from tests.support.nouns import Family, Operands, Problem, Scaling, matrices, registry

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
    """A, B, their factors, a bias and C, which is NaN, and what C should be in float64.

    The contract of families sees to it that a factor in another one's place shows.
    """
    family = registry.get(Family, of.family)
    made = family.make_inputs(of, device, seed=seed)
    c = torch.full((of.m, of.n), float("nan"), device=device).to(getattr(torch, of.c.type.torch))
    return {**made, "c": c}, family.reference(of, made)
