"""Products of integers on a GPU: sums in int32 that float32 could not hold, of each template that reads them."""

import pytest
import torch

import tritongemm
from tests.gpu.here import record, triton
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.dispatcher import Dispatcher

SWAPPED = (("swap_ab", 1),)
CONFIGS = (
    Config("tile", 64, 64, 128, 4, 2, 4, 2),
    Config("tma", 64, 128, 128, 8, 2, 4, 3),
    Config("tma", 32, 64, 128, 1, 4, 4, 3, (("poll", 1), *SWAPPED)),
    Config("tma", 128, 256, 128, 8, 1, 8, 3),
    Config("persistent", 128, 64, 128, 8, 1, 8, 3, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 128, 8, 1, 4, 3, (("share_more", 1),)),
    Config("ws_tma", 128, 128, 128, 8, 1, 8, 4, (("share", 2),)),
    Config("ws_tma", 128, 256, 128, 4, 1, 8, 3, (("epilogue_parts", 2),)),
    Config("ws_tma", 128, 256, 128, 4, 2, 8, 3, (("epilogue_parts", 2), ("pair", 1))),
    Config("ws_tma", 128, 192, 64, 4, 1, 8, 3, (("share", 1),)),
    Config("ws_tma", 256, 160, 64, 1, 1, 8, 4, (("epilogue_parts", 4),)),
    Config("ws_tma", 64, 80, 64, 1, 3, 4, 4),
    Config("ws_tma", 128, 112, 128, 2, 1, 8, 5, (("pair", 1),)),
    Config("ws_tma", 64, 32, 128, 1, 8, 4, 8),
    Config("ws_tma", 64, 64, 256, 1, 2, 4, 6, (("ahead", 4),)),  # blocks in two pieces
    Config("ws_tma", 64, 64, 256, 2, 1, 4, 5, (("pair", 1),)),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 8, SWAPPED),
    Config("ws_tma_swapped", 40, 64, 128, 1, 3, 4, 3, SWAPPED),
    Config("ws_tma_swapped", 256, 64, 64, 1, 1, 4, 3, SWAPPED),
    Config("ws_tma_swapped", 136, 128, 64, 4, 1, 8, 4, (("epilogue_parts", 4), *SWAPPED)),
)


def large(rows: int, k: int) -> torch.Tensor:
    """Numbers whose sums are far beyond the 2 ** 24 up to which float32 holds each integer."""
    return torch.randint(90, 128, (rows, k), device="cuda", dtype=torch.int8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("size", [(300, 528, 16400), (7, 272, 16400)])
def test_sums_are_exact_beyond_float32(gpu_machine: Machine, config: Config, size: tuple[int, int, int]) -> None:
    problem = Problem(*size, *matrices("int8", c="int32", layout="TN"))
    if not triton().check(config, problem, gpu_machine.target):
        pytest.skip(f"{gpu_machine.target.name} has no {config.template}")
    a, w = large(size[0], size[2]), large(size[1], size[2])
    exact = (a.double() @ w.double().T).to(torch.int64)
    assert exact.min() > 2**26
    mine = Dispatcher()
    assert mine.load([record(problem, config)]) == 1
    for _ in range(3):  # counters and flags of cut tiles are as they were
        found = mine.run(a, w, None, torch.int32)
        assert torch.equal(found.long(), exact)
    assert str(mine.explain(a, w, None, torch.int32)).startswith("exact")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_scales_multiply_the_exact_sum(gpu_machine: Machine, config: Config, dispatcher: Dispatcher) -> None:
    """Factors are powers of two and sums multiples of 64 below 2 ** 30: float32 has every bit of the result."""
    m, n, k = 300, 528, 4096
    problem = registry.get(Family, "a8w8").problem(Problem(m, n, k, *matrices("int8", c="fp32", layout="TN")))
    if not triton().check(config, problem, gpu_machine.target):
        pytest.skip(f"{gpu_machine.target.name} has no {config.template}")
    a, w = (large(rows, k) // 8 * 8 for rows in (m, n))
    of_a = torch.randint(-10, 11, (m,), device="cuda").float().exp2()
    of_b = torch.randint(-10, 11, (n,), device="cuda").float().exp2()
    exact = (a.double() @ w.double().T) * of_a[:, None].double() * of_b[None, :].double()
    assert dispatcher.load([record(problem, config)]) == 1
    found = tritongemm.scaled_mm(a, w, of_a, of_b, out_dtype=torch.float32)
    assert torch.equal(found.double(), exact)
    assert tritongemm.explain("scaled_mm", a, w, of_a, of_b, out_dtype=torch.float32).startswith("exact")
