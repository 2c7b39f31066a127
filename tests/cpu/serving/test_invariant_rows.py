from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import StandInKernel, attach_device, problem, record
from tests.support.nouns import Config, Dispatcher, LoadedKernel, Patch, Problem, Record, Support
from tritongemm.serving.device_kernels import DeviceKernels

SIZE = problem(16, 32, 64)
ROW = record(SIZE, config=Config("tile", 64, 64, 32), order="1x64", row_bits="aa")
UNTUNED = "tile__bm16__bn64__bk64__gm1__sk1__w4__s3__swap_ab1"


class Wanted:
    """A GPU whose calls want invariant rows: its kernels' bits, and which untuned kernels were loaded."""

    def __init__(self, gpu: Gpu) -> None:
        self.dispatcher, self.empty = gpu
        self.bits: dict[Any, str | Support] = {}
        self.untuned: list[Record] = []
        self.refused = Support()
        self.dispatcher.want_invariant_rows(self)

    def load(self, *records: Record) -> DeviceKernels:
        self.dispatcher.load(records)
        own = {r.problem: StandInKernel() for r in records if r.winner == "triton"}
        kernels = attach_device(self.dispatcher, dict(own))
        kernels.load_record = self._load
        kernels.row_bits = lambda kernel, problem: self.bits.get(kernel, "aa")  # type: ignore[method-assign]
        return kernels

    def _load(self, untuned: Record) -> LoadedKernel | Support:
        self.untuned.append(untuned)
        return self.refused if not self.refused else StandInKernel()

    def explain(self, m: int) -> list[str]:
        return str(self.dispatcher.explain(self.empty(m, 64), self.empty(32, 64))).splitlines()


@pytest.fixture
def wanted(gpu: Gpu) -> Iterator[Wanted]:
    yield Wanted(gpu)


def test_rows_serve_that_state_their_order_and_untuned_kernels_at_all_other_m(wanted: Wanted) -> None:
    wanted.load(ROW, replace(ROW, problem=SIZE.at(8), order="", row_bits=""), record(SIZE.at(4), winner="torch"))
    assert wanted.explain(16)[0].startswith("exact: tile__bm64__bn64__bk32")
    for m, answer in ((8, "tuned_record"), (4, "library_winner"), (5, "")):
        first, *others = wanted.explain(m)
        assert first == f"invariant: {UNTUNED} (not tuned; its order of additions, 1x64, is that of all M)"
        refusal = f"  {answer} declines: rows must be invariant, and this one states no order of additions"
        assert not answer or refusal in others
    assert [(r.problem.m, r.config.name, r.order) for r in wanted.untuned] == [(m, UNTUNED, "1x64") for m in (8, 4, 5)]
    wanted.dispatcher.want_invariant_rows(wanted, False)
    assert wanted.explain(8)[0].startswith("exact") and wanted.explain(4)[0].startswith("library")


@pytest.mark.parametrize("variable", ["TRITONGEMM_INVARIANT", "VLLM_BATCH_INVARIANT", ""])
def test_variables_and_pytorchs_deterministic_mode_want_them(gpu: Gpu, monkeypatch: Patch, variable: str) -> None:
    assert not gpu[0].wants_invariant_rows
    if variable:
        monkeypatch.setenv(variable, "1")
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert gpu[0].wants_invariant_rows


def test_a_row_whose_kernel_has_another_order_or_other_bits_does_not_serve(wanted: Wanted) -> None:
    wanted.load(replace(ROW, problem=problem(16, 32, 64), config=Config("tile", 64, 64, 32, split_k=2)))
    with pytest.warns(UserWarning, match="it states the order 1x64, and its kernel adds up in the order 2x32"):
        assert wanted.explain(16)[0].startswith("invariant")
    kernels = wanted.load(ROW)
    wanted.bits[kernels.loaded[SIZE]] = "bb"
    with pytest.warns(UserWarning, match="its rows have other bits than those of the order 1x64 that it states"):
        assert wanted.explain(16)[0].startswith("invariant")
    kernels = wanted.load(ROW)
    wanted.bits |= {kernels.loaded[SIZE]: Support("equal rows 0 and 3 of a batch of 16 have other bits")}
    with pytest.warns(UserWarning, match="equal rows 0 and 3"):
        assert wanted.explain(16)[0].startswith("invariant")


def test_other_operands_than_the_tables_change_the_bits_of_all_kernels_alike(wanted: Wanted) -> None:
    wanted.load(replace(ROW, row_bits="of another PyTorch"))
    assert wanted.explain(16)[0].startswith("exact") and [r.config.name for r in wanted.untuned] == [UNTUNED]


def test_rows_of_two_orders_are_a_conflict_that_is_named(wanted: Wanted) -> None:
    other = replace(ROW, problem=SIZE.at(300), config=replace(ROW.config, split_k=2), order="2x32", row_bits="cc")
    wanted.load(ROW, other)
    with pytest.warns(UserWarning, match="has rows of several orders of additions, so none serves: 1x64, bits aa: "):
        first, *others = wanted.explain(16)
    assert first.startswith("fallback") and any("invariant_kernel declines: N 32, K 64" in line for line in others)


def test_nothing_is_loaded_or_compared_while_a_graph_is_captured(wanted: Wanted, monkeypatch: Patch) -> None:
    wanted.load(ROW)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, *others = wanted.explain(16)
    assert first.startswith("fallback") and not wanted.untuned
    assert sum("not while a graph is captured" in line for line in others) == 2


def test_a_kernel_that_can_not_be_launched_gives_way_to_the_next_of_its_order(wanted: Wanted) -> None:
    wanted.load(ROW)
    wanted.refused = Support("out of shared memory")
    assert wanted.explain(7)[0].startswith("fallback")
    assert len(wanted.untuned) > 3 and {r.order for r in wanted.untuned} == {"1x64"}


def test_a_patched_model_wants_them_until_it_is_undone(unloaded: Dispatcher) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    patch = tritongemm.patch(model, [], invariant=True)
    assert len(patch.patched) == 2 and unloaded.wants_invariant_rows
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert model(x).shape == (3, 16)
    patch.undo()
    assert not unloaded.wants_invariant_rows and type(model[0]) is nn.Linear


def test_untuned_kernels_of_all_m_have_one_order_on_every_target() -> None:
    from tests.support.kernel_cases import GFX942, SM90
    from tritongemm.plugins import registry
    from tritongemm.plugins.contracts import KernelBackend
    from tritongemm.serving.sources.invariant_kernel import _candidates

    triton = registry.get(KernelBackend, "triton")

    def orders(product: Problem, target: Any) -> set[str]:
        return {
            str(triton.reduction_order(c, product, target))
            for c in _candidates(product, target)
            if triton.check(c, product, target)
        }

    for target in (SM90, GFX942):
        assert set.intersection(*(orders(SIZE.at(m), target) for m in (1, 60, 5000)))
