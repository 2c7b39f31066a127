"""Runs whose rows have the same bits at every M; the interpreter's end; copies of guarded tensors."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.kernel_cases import SM90
from tests.support.nouns import Config, Groups, InputError, RaceResult, SearchLimits, Target, load_target, registry
from tests.support.tables import cases, each, heavy
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.reduction_order import EXACT, ReductionOrder
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure.guarded_operands import guarded
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.measure.invariance import Invariance, possible_orders
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins.contracts import Family, SearchedBackend
from tritongemm.search.planner import NO_LIMITS, rank_space
from tritongemm.system.child_process import WorkerDied
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.servers import server_format
from tritongemm.tune.task import make_record

BF16, FP8 = matrices("bf16", layout="TN"), matrices("fp8e4m3fn", "fp8e4m3fn", "bf16", layout="TN")
FEW = (("num_stages", (3, 4)),)  # of the axes, whose other values have the same orders
SIZE = Problem(16, 4096, 4096, *BF16)
UNSPLIT = ReductionOrder(4096, 4096)
TILES = [Config("tile", 16, 32, 64), Config("tma", 64, 64, 64), Config("tile", 128, 64, 64)]
LIBRARY = Config("heuristic", 64, 64, 64, backend="blaslt")


def raced(*bits: str, library: str = "") -> RaceResult:
    found = [(config, one) for config, one in zip(TILES, bits, strict=False)] + [(LIBRARY, library)] * bool(library)
    trials = [Trial(c, "ok", "", (1e-6,), "events", "final", 0.0, 0.1, row_bits=one) for c, one in found]
    samples = {t.config.name: t.samples for t in trials} | {BASELINE_ENTRY: (1e-6,)}
    return RaceResult(tuple(trials), samples, cold=True)


def test_products_have_the_order_of_an_unsplit_k_or_of_splits_that_fill_the_device() -> None:
    blocks = registry.get(Family, "a8w8_blockscale").problem(Problem(16, 512, 2048, *FP8))
    int8 = Problem(16, 64, 512, *matrices("int8", "int8", "int32", layout="TN"))
    orders = possible_orders([SIZE, SIZE.at(2048), blocks.at(100), int8], SM90, "triton", NO_LIMITS)
    assert orders == {
        SIZE.at(1): (UNSPLIT,),
        blocks.at(1): (ReductionOrder(2048, 2048, 128, "wgmma"),),
        int8.at(1): (EXACT,),
    }
    narrow = Problem(16, 1280, 8192, *BF16)

    def others(problem: Problem, target: Target = SM90) -> list[str]:
        (orders,) = possible_orders([problem, problem.at(2048)], target, "triton", NO_LIMITS).values()
        return [str(order) for order in orders[1:]]

    assert others(narrow) == ["2x4096", "4x2048"]
    assert others(narrow, load_target("sm120")) == ["2x4096", "4x2048", "8x1024"]
    blocks = registry.get(Family, "a8w8_blockscale").problem(Problem(16, 2112, 7168, *FP8))
    assert others(blocks) == ["2x3584 blocks of 128 by wgmma"]
    assert others(narrow.at(512)) == others(replace(narrow, n=2560)) == []


def test_runs_of_k_are_added_pairwise_where_that_is_asked_for() -> None:
    blocks = registry.get(Family, "a8w8_blockscale").problem(Problem(16, 512, 2048, *FP8))
    orders = [str(those[0]) for those in possible_orders([SIZE, blocks], SM90, "triton", NO_LIMITS, 8).values()]
    assert orders == ["8x512 pairwise", "8x256 blocks of 128 by wgmma pairwise"]
    assert str(possible_orders([SIZE], SM90, "triton", NO_LIMITS, 2)[SIZE.at(1)][0]) == "2x2048"
    with pytest.raises(InputError, match=r"--invariant-runs 8: K 1536 of .* is no multiple of 8 x 128"):
        possible_orders([replace(blocks, k=1536)], SM90, "triton", NO_LIMITS, 8)
    limits = SearchLimits(axes=FEW, order=ReductionOrder(4096, 512, sums="pairwise"))
    kept = rank_space(SIZE, SM90, "triton", limits)[1].kept
    assert {(c.template, c.split_k, c.option("runs"), c.option("pairwise")) for c in kept} == {
        (template, 1, 8, 1) for template in ("tile", "tma", "ws_tma", "ws_tma_swapped")
    }
    two = SearchLimits(axes=FEW, order=ReductionOrder(2048, 1024, 128, "wgmma"))
    kept = rank_space(blocks.at(2048), SM90, "triton", two)[1].kept
    assert "ws_tma" in {c.template for c in kept if c.option("runs") == 2}
    few = Problem(16, 256, 1024, *matrices("bf16", layout="TN"))
    limits = SearchLimits(axes=FEW, order=ReductionOrder(1024, 128, sums="pairwise"))
    assert {c.split_k for c in rank_space(few, SM90, "triton", limits)[1].kept} == {1}, "not half of the runs each"
    runs = Config("tile", 64, 64, 64, options=(("pairwise", 1), ("runs", 8)))
    asked = [registry.get(SearchedBackend, "triton").check(runs, replace(few, k=k), SM90) for k in (2048, 2112)]
    assert asked[0] and "each run that is added pairwise must have a block of K" in str(asked[1]), "the eighth has none"


@each("problem", [replace(SIZE, bias="m"), Problem(16, 64, 64, *BF16, groups=Groups(2, room=8))])
def test_products_whose_rows_are_not_compared_are_refused(problem: Problem) -> None:
    with pytest.raises(InputError, match=r"--invariant: .*rows"):
        possible_orders([problem], SM90, "triton", NO_LIMITS)


@pytest.mark.parametrize("m", [1, heavy(300)])
def test_a_search_keeps_the_configs_of_the_order(m: int) -> None:
    problem = registry.get(Family, "a8w8_blockscale").problem(Problem(m, 512, 2048, *FP8))
    order = ReductionOrder(2048, 2048, 128, "wgmma")
    triton = registry.get(SearchedBackend, "triton")
    kept = rank_space(problem, SM90, "triton", SearchLimits(axes=FEW, order=order))[1].kept
    assert {str(triton.reduction_order(c, problem, SM90)) for c in kept} == {str(order)}
    narrow = Problem(m, 1280, 8192, *BF16)
    split = ReductionOrder(8192, 2048 if m == 1 else 4096)
    kept = rank_space(narrow, SM90, "triton", SearchLimits(axes=FEW, order=split))[1].kept
    assert {str(triton.reduction_order(c, narrow, SM90)) for c in kept} == {str(split)}
    if m == 1:
        assert {c.option("runs", 1) for c in kept} >= {4} and any(c.split_k == 4 for c in kept)
        limits = SearchLimits(axes=FEW, order=ReductionOrder(2048, 1024, unit="hand"))
        _, none, ranked = rank_space(problem, SM90, "triton", limits)
        assert not none.kept and not ranked.configs
    else:
        assert {c.split_k for c in kept} == {1, 2}


def test_the_bits_of_the_first_race_hold_and_a_library_races_where_asked_for() -> None:
    run = Invariance({SIZE.at(1): [UNSPLIT]}, with_libraries=True)
    first = run.compare(SIZE, raced("aa", "aa", "bb", library="aa"))
    assert [t.status for t in first.trials] == ["ok", "ok", "wrong", "ok"]
    assert first.samples.keys() == {TILES[0].name, TILES[1].name, LIBRARY.name, BASELINE_ENTRY}
    assert first.trials[2].reason == "its rows have other bits than those of the order 1x4096"
    assert [t.status for t in run.compare(SIZE.at(300), raced("bb", "bb", library="bb")).trials] == ["wrong"] * 3
    split = replace(LIBRARY, split_k=4)
    alone, both = (Invariance({SIZE.at(1): [UNSPLIT]}, with_libraries=one) for one in (False, True))
    assert [one.allows(c, SIZE, SM90) for one in (alone, both) for c in (LIBRARY, split)] == [False, False, True, False]
    stream_k = Config("stream_k", 64, 64, 64)
    assert [both.allows(c, SIZE, SM90) for c in (*TILES, stream_k)] == [True, True, True, False]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_rows_of_a_servers_table_have_one_order_if_the_same_instructions_multiply(server: str) -> None:
    """The servers take a row of another M, so that tiles of few rows, which are multiplied otherwise, depend on M."""
    blocks = registry.get(Family, "a8w8_blockscale").problem(Problem(16, 2112, 7168, *FP8))
    limits = server_format(server).limits(blocks.family, SM90)
    run = Invariance(possible_orders([blocks, blocks.at(4096)], SM90, "triton", limits))
    assert str(run.order(blocks)) == "1x7168 blocks of 128 by wgmma"
    tiles = (Config("tile", rows, 64, 128, num_warps=4, num_stages=3, backend=server) for rows in (16, 32, 64, 128))
    assert [run.allows(config, blocks, SM90) for config in tiles] == [False, False, True, True]


def test_results_say_their_order_and_the_baseline_never_wins(tmp_path: Path) -> None:
    run = Invariance({SIZE.at(1): [UNSPLIT]})
    options = TuningOptions(tmp_path, invariance=run)
    record = make_record(SIZE, run.compare(SIZE, raced("aa")), SM90, options, frozenset(), "by eye")
    assert (record.order, record.row_bits, record.winner, record.library_seconds) == ("1x4096", "aa", "triton", 1e-6)
    run.note([record], SM90)
    with pytest.raises(InputError, match="_TN that states no order of additions, and this"):
        run.note([replace(record, order="")], SM90)
    with pytest.raises(InputError, match="where stream_k cuts K depends on M, or on"):
        run.note([replace(record, config=Config("stream_k", 64, 64, 64))], SM90)
    several = Invariance({SIZE.at(1): [ReductionOrder(4096, 2048), UNSPLIT]})
    assert several.order(SIZE).runs == 2
    several.note([record], SM90)
    assert several.order(SIZE.at(300)) == UNSPLIT


KILLED, FAULT = WorkerDied("signal SIGKILL", from_outside=True), WorkerDied("signal SIGSEGV")


@cases(([KILLED], "ok", False), ([KILLED, KILLED], "crashed", True), ([FAULT], "crashed", False))
def test_an_interpreter_that_others_kill_is_no_fault_of_the_candidate(
    ends: list[WorkerDied], status: str, try_again: bool, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(ends)

    def ask(job: InterpreterJob, timeout: float) -> Iterator[tuple[float, float]]:
        if left:
            raise left.pop()
        yield 0.0, 1e-3

    with closing(OfflineEvaluator(load_target("gfx942"), 5.0)) as evaluator:
        monkeypatch.setattr(evaluator._process, "ask", ask)
        trial = evaluator._interpret(Problem(16, 16, 16), Config("tile", 16, 16, 16))
    assert (trial.status, trial.try_again, left) == (status, try_again, [])


@cases(
    torch.arange(15.0).view(3, 5),
    torch.arange(15.0).view(3, 5).T,
    torch.arange(63).view(7, 9)[:, 2:5],
    torch.arange(5.0).expand(3, 5),
    torch.zeros(0, 4),
    torch.tensor(3),
    torch.ones(4096, dtype=torch.float8_e4m3fn),
)
def test_guarded_memory_holds_a_tensor_as_it_is(tensor: torch.Tensor, /) -> None:
    copy = guarded(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(copy.float(), tensor.float())
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()


@each("count", [1, 1024, 5000])
def test_nothing_can_be_read_or_written_behind_a_guarded_tensor(count: int) -> None:
    """Its last byte is the last of its pages, and the page behind it allows no access."""
    copy = guarded(torch.zeros(count, dtype=torch.int32))
    end = copy.data_ptr() + 4 * count
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    pages = {tuple(int(place, 16) for place in line[0].split("-")): line[1] for line in lines}
    access = {allowed for (start, stop), allowed in pages.items() if start <= end < stop}
    assert access == {"---p"} or access == {"---s"}
    assert any(start < end == stop and allowed.startswith("rw") for (start, stop), allowed in pages.items())
