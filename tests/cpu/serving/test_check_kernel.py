"""Kernels that another toolchain tuned, or that a library loads late, are run before they serve."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.linear_layers import HostKernel, record, run_on_cpu, stand_in_device
from tests.support.nouns import DriverError, Family, Patch, Problem, each, matrices, registry
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.serving.stored_kernels import check_kernel

DENSE = Problem(8, 128, 256, *matrices("fp32"))
FP8 = Problem(8, 128, 256, *matrices("fp8e4m3fn", c="bf16", layout="TN"))
PROBLEMS = [DENSE, *(registry.get(Family, name).problem(FP8) for name in ("a8w8", "a8w8_blockscale"))]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: Patch) -> None:
    run_on_cpu(monkeypatch)


def computing(of: Problem, off: float = 0.0, lost: str = "") -> HostKernel:
    """A kernel that is `off` beside the truth, or reads ones instead of an operand."""
    family = registry.get(Family, of.family)
    made = family.make_inputs(of, "cpu")
    exact = family.reference(of, made | ({lost: torch.ones_like(made[lost])} if lost else {}))
    return HostKernel((exact + off).to(getattr(torch, of.c.type.torch)))


@each("of", PROBLEMS)
def test_what_serves_and_what_does_not(of: Problem, monkeypatch: Patch) -> None:
    check = partial(check_kernel, record=record(of), device=stand_in_device())
    right = computing(of)
    assert check(right) and len(right.launched) == 2 and all(right.launched[0][name] for name in of.operands)
    wrong = [computing(of, off=99.0)] + ([computing(of, lost="scale_b")] if of.b.scaling else [])
    assert all("wrong with Triton " in check(one).reason for one in wrong)

    def refuse(kernel: HostKernel, device: Any) -> PatchedLaunch:
        raise DriverError("launch", 1, "REFUSED", "not on Mondays")

    monkeypatch.setattr(HostKernel, "prepare", refuse)
    assert "not on Mondays" in check(right).reason


def test_what_was_accepted_with_an_error_ratio_still_serves() -> None:
    """Its error was beyond the tolerance, in few elements; it must not have grown."""
    check = partial(check_kernel, device=stand_in_device())
    accepted = replace(record(DENSE), error=0.1, tolerance=1e-3)
    assert not check(computing(DENSE, 0.5), replace(accepted, error=1e-7)) and check(computing(DENSE, 0.5), accepted)
    assert not check(computing(DENSE, 9.0), accepted)
