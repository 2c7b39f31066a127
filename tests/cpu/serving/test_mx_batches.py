"""`scaled_bmm` and `grouped_mm` of OCP MX, a power of two for each 32 along K: PyTorch's results, rows that serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.linear_layers import StandInKernel, attach_device, record, run_on_cpu, stand_in_kernels
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.support import Support
from tritongemm.numerics import verify
from tritongemm.operations.batched import BATCHED, BatchOperands
from tritongemm.operations.contract import Strides
from tritongemm.operations.grouped import GROUPED, GroupedOperands
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.record_table import RecordTable

TORCH = {"fp8e4m3fn": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2, "fp4e2m1": torch.uint8}
SHUFFLED = "e8m0_32x8"


def problem(dtype: str, batch: int, m: int, n: int, k: int, shuffled: bool, shared: str = "") -> Problem:
    family = registry.get(Family, "a4w4_blockscale" if dtype == "fp4e2m1" else "a8w8_blockscale")
    made: Problem = family.problem(
        Problem(m, n, k, *matrices(dtype, c="bf16", layout="TN", shared=shared), batch=batch),
        "mx_shuffled" if shuffled else "mx",
    )
    return made


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 45, 330), (33, 16, 256)])
def test_pytorch_computes_what_no_kernel_does(dtype: str, shuffled: bool, m: int, n: int, k: int) -> None:
    one = problem(dtype, 3, m, n, k, shuffled)
    family = registry.get(Family, one.family)
    given = family.make_inputs(one, "cpu")
    exact = family.reference(one, given)
    layout = SHUFFLED if shuffled else ""
    operands: tuple[Any, ...] = (given["a"], given["b"], given["scale_a"], given["scale_b"].mT)
    found = tritongemm.scaled_bmm(*operands, scale_layout=layout)
    assert verify.deviation(found, exact) <= family.tolerance(one)
    shared = given["a"][:1].expand(3, -1, -1), given["b"], given["scale_a"][:1].expand(3, -1, -1), operands[3]
    first = tritongemm.scaled_bmm(*shared, scale_layout=layout)
    assert torch.equal(first[0], found[0]) and not torch.equal(first[1], found[1])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize("dtype", TORCH)
def test_a_row_serves(dtype: str, shared: str, shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tuning measures is what a call of the same operands asks for; other M are served by the next one."""
    run_on_cpu(monkeypatch)
    tuned = problem(dtype, 4, 16, 300, 640, shuffled, shared)
    dispatcher = Dispatcher()
    assert dispatcher.load([record(tuned)]) == 1
    kernels = attach_device(dispatcher, {tuned: StandInKernel()})
    kernels.binders[tuned, 0] = lambda m: StandInKernel()

    def given(m: int) -> BatchOperands:
        def empty(name: str, rows: int, columns: int, kind: torch.dtype) -> Tensor:
            batch = 1 if name == shared else 4
            return torch.empty((batch, rows, columns), dtype=kind, device="cuda:0").expand(4, -1, -1)

        width = 640 // tuned.a.type.packed
        shapes = [(-(-rows // 32) * 32, 24) if shuffled else (rows, 20) for rows in (m, 300)]
        a, b = empty("a", m, width, TORCH[dtype]), empty("b", 300, width, TORCH[dtype]).mT
        of_a, of_b = (empty(name, *shape, torch.uint8) for name, shape in zip("ab", shapes, strict=True))
        return BatchOperands(a, b, None, torch.bfloat16, of_a, of_b.mT, SHUFFLED if shuffled else "")

    with FakeTensorMode(allow_non_fake_inputs=True):
        found = BATCHED.read(BATCHED.check(given(16)))
        assert not isinstance(found, Support)
        assert tuned in found.problems and found.moved(tuned) == {}
        own = problem(dtype, 4, 16, 300, 640, shuffled)
        assert found.moved(own).keys() == ({shared, f"scale_{shared}"} if shared else set())
        answers = dispatcher.ask(BATCHED, BATCHED.check(given(16)))
        assert str(answers).startswith("exact: tile") and answers.resolution.kernel is not None
        near = str(dispatcher.ask(BATCHED, BATCHED.check(given(77))))
        assert near.startswith("near: M 16, as no row has 77")
        if dtype == "fp4e2m1" and not shared:  # as a model's heads are stored, two numbers a byte
            moved_from = torch.empty_strided((4, 16, 320), (640, 8 * 640, 1), dtype=torch.uint8, device="cuda:0")
            moved = BATCHED.read(BATCHED.check(given(16)._replace(a=moved_from)))
            assert not isinstance(moved, Support) and moved.moved(own) == {"a": Strides(8 * 640, 640)}


def test_what_is_no_order_of_factors_is_refused() -> None:
    one = problem("fp8e4m3fn", 2, 4, 32, 64, False)
    given = registry.get(Family, one.family).make_inputs(one, "cpu")
    operands = given["a"], given["b"], given["scale_a"], given["scale_b"].mT
    with pytest.raises(InputError, match="no scale layout is called 'spiral'; there are: e8m0_32x8"):
        tritongemm.scaled_bmm(*operands, scale_layout="spiral")
    with pytest.raises(InputError, match=r"scale_a is torch\.uint8"):
        tritongemm.scaled_bmm(*operands, scale_layout=SHUFFLED)


def groups(dtype: str, room: int, shuffled: bool) -> Problem:
    family = registry.get(Family, "a4w4_blockscale" if dtype == "fp4e2m1" else "a8w8_blockscale")
    made: Problem = family.problem(
        Problem(
            16,
            45,
            330,
            *matrices(dtype, c="bf16", layout="TN"),
            groups=Groups(4, room=room, spread="captured", counts=(5, 0, 9, 2)),
        ),
        "mx_shuffled" if shuffled else "mx",
    )
    return made


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("room", [0, 11])
@pytest.mark.parametrize("dtype", TORCH)
def test_groups(dtype: str, room: int, shuffled: bool) -> None:
    """What PyTorch computes is right, and a call asks for the row that tuning makes of the same operands."""
    asked = groups(dtype, room, shuffled)
    family = registry.get(Family, asked.family)
    given = family.make_inputs(asked, "cpu")
    scale_a = given["scale_a"] if shuffled or not room else given["scale_a"].view(4, 11, -1)
    operands = GroupedOperands(
        given["a"], given["b"], given[asked.group_operand], scale_a, given["scale_b"], torch.bfloat16,
        SHUFFLED if shuffled else "",
    )  # fmt: skip
    found = tritongemm.grouped_mm(*operands[:6], scale_layout=operands.scale_layout)
    exact = family.reference(asked, given)
    there = ~exact[..., 0].isnan()
    assert verify.deviation(found[there], exact[there]) <= family.tolerance(asked)
    reading = GROUPED.read(GROUPED.check(operands))
    assert not isinstance(reading, Support)
    kernels = stand_in_kernels(RecordTable([record(asked)]), {asked: StandInKernel()})
    kernels.binders[asked, 0] = lambda m: StandInKernel()
    near = kernels.find_near(reading.problems[0])
    assert not isinstance(near, Support) and near.row.record.problem == asked
    read = reading.tensors
    assert {name: read[name].shape.numel() for name in given} == {name: t.numel() for name, t in given.items()}


def test_factors_of_groups_that_do_not_belong_are_refused() -> None:
    asked = groups("fp4e2m1", 0, False)
    given = registry.get(Family, asked.family).make_inputs(asked, "cpu")
    a, b, ends, of_a, of_b = (given[name] for name in ("a", "b", "offsets", "scale_a", "scale_b"))
    with pytest.raises(InputError, match=r"scale_a must be e8m0 \(16, 11\), not torch.uint8 \(16, 10\)"):
        tritongemm.grouped_mm(a, b, ends, of_a[:, :10], of_b)
    with pytest.raises(InputError, match="no scale layout is called 'spiral'"):
        tritongemm.grouped_mm(a, b, ends, of_a, of_b, scale_layout="spiral")
    with pytest.raises(InputError, match="it is of factors that are powers of two"):
        tritongemm.grouped_mm(a.float(), b.float(), ends, scale_layout=SHUFFLED)
    with pytest.raises(InputError, match="scale_a holds NaN"):
        tritongemm.grouped_mm(a, b, ends, torch.full_like(of_a, 255), of_b)
