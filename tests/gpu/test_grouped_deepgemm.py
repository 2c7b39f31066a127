"""DeepGEMM's products of groups on a real GPU, against float64: uneven groups, empty ones, and groups of equal room."""

import pytest
import torch

from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.machine import Machine
from tritongemm.numerics import grouped
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend


@pytest.mark.parametrize(("family", "dtype"), [("dense", "bf16"), ("a8w8_blockscale", "fp8e4m3fn")])
@pytest.mark.parametrize("counts", [(5, 0, 130, 1), (128, 256, 0, 128)])
@pytest.mark.parametrize("room", [0, 264])
def test_groups_of_rows(gpu_machine: Machine, family: str, dtype: str, counts: tuple[int, ...], room: int) -> None:
    backend, numbers = registry.get(LibraryBackend, "deepgemm"), registry.get(Family, family)
    groups, operands_of = Groups(len(counts), room, "captured", counts), matrices(dtype, c="bf16", layout="TN")
    problem = numbers.problem(Problem(sum(counts), 1040, 768, *operands_of, groups=groups))
    state = registry.available(Backend, "deepgemm") and backend.supports(problem, gpu_machine.target)
    if not state:
        pytest.skip(state.reason)
    operands = numbers.make_inputs(problem, "cuda")
    operands["c"] = torch.empty(problem.operands["c"].shape, dtype=torch.bfloat16, device="cuda")
    configs = backend.list_algorithms(problem, operands)
    assert configs
    for config in configs:
        operands["c"].fill_(float("nan"))
        call = backend.operation(problem, operands, config)
        assert call is not None
        operands["c"].fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        c, exact = grouped.written(problem, operands["c"], numbers.reference(problem, operands))
        assert deviation(c, exact) <= numbers.tolerance(problem), config.name
