from typing import Any

from tests.support.nouns import Family, Problem, matrices, registry

FP8, FP4 = "fp8e4m3fn", "fp4e2m1"
LAYOUTS = ("layout", "order", "shared")


def product(family: str, m: int, n: int, k: int, types: str, scales: str = "", **form: Any) -> Problem:
    """x [M, K] @ w [N, K].T into bfloat16, with the scale factors of a family.

    Args:
        family: of numbers.
        m, n, k: sizes.
        types: of A, and of B and C where these are others than A's and bfloat16.
        scales: their granularity; "" for the family's first one.
        form: of the operands, as of `matrices`, and of the problem.
    """
    a, b, c, *_ = [*types.split(), "", ""]
    stored = {"layout": "TN"} | {name: form.pop(name) for name in LAYOUTS if name in form}
    made: Problem = registry.get(Family, family).problem(
        Problem(m, n, k, *matrices(a, b, c or "bf16", **stored), **form), scales
    )
    return made
