from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import StandInKernel, attach_device, problem, record
from tests.support.nouns import Defaults, InputError, Launch, Patch, Record, Support, each, load_target, results_format
from tests.support.shipped import ALGORITHM
from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.core.config import Config
from tritongemm.core.served_call import LoadedKernel
from tritongemm.operations.contract import Reading
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.serving.dispatcher import CallAnswers
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.tuned_calls import TunedCalls
from tritongemm.system import settings

SM90 = load_target("sm90", compute_units=132)
TABLE = [
    record(problem(1, 32, 64), m_from=1),
    record(problem(16, 32, 64), m_from=2),
    record(problem(20, 32, 64)),
    record(problem(64, 32, 64), winner="torch", m_from=17),
]


@given(m=st.integers(1, 80))
def test_each_m_has_the_row_of_its_range_and_its_own_before_that(m: int) -> None:
    found = RecordTable(TABLE).find(problem(m, 32, 64), "sm90", 132)
    wanted = TABLE[2] if m == 20 else next((r for r in (*TABLE[:2], TABLE[3]) if m <= r.problem.m), None)
    if wanted is None:
        assert isinstance(found, Support) and "the table over M has 1 to 64, and not this one" in str(found)
    else:
        assert found is wanted


def test_a_range_is_of_its_product_and_device_or_refused_by_name() -> None:
    one = record(problem(16, 32, 64), m_from=1, compute_units=132)
    table = RecordTable([one])
    assert table.find(problem(3, 32, 64), "sm90", 132) is one
    for other, arch, units in (
        (problem(3, 32, 64, "n"), "sm90", 132),
        (problem(3, 32, 128), "sm90", 132),
        (problem(3, 32, 64), "gfx942", 132),
        (problem(3, 32, 64), "sm90", 78),
    ):
        assert isinstance(table.find(other, arch, units), Support)
    with pytest.raises(InputError, match="m_from must be at most M, 16, not 17"):
        record(problem(16, 32, 64), m_from=17)
    text = results_format().write([TABLE[1]]).replace('"M_from": 2', '"M_from": 99')
    with pytest.raises(InputError, match=r"x.yaml: row 1 \(line 2\).*m_from must be at most M, 16, not 99"):
        results_format().read(Path("x.yaml"), text, Defaults())
    text = results_format().write([replace(TABLE[1], held_out={"7": [0.01, 1.1]})]).replace("[0.01, 1.1]", "[0.01]")
    with pytest.raises(InputError, match=r"row 1 .*held_out must be a map of two ratios of times for each M"):
        results_format().read(Path("x.yaml"), text, Defaults())


def test_explain_names_the_range_and_the_row(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    dispatcher.load(TABLE)
    own, bound = StandInKernel(), StandInKernel()
    kernels = attach_device(dispatcher, {TABLE[2].problem: own})
    kernels.loaded_ranges = {r.problem: own for r in TABLE[:2]}
    asked: list[int] = []

    def bind(m: int) -> LoadedKernel:
        asked.append(m)
        return bound

    kernels.binders[TABLE[1].problem, 2] = bind

    def answers(m: int) -> CallAnswers:
        return dispatcher.explain(empty(m, 64), empty(32, 64))

    def explained(m: int) -> str:
        return str(answers(m))

    assert explained(16).startswith("exact: tile__") and not asked
    assert explained(7).startswith("range: M 2 to 16: tile__") and "at M 16" in explained(7) and set(asked) == {7}
    assert answers(7).resolution.kernel is bound
    assert explained(40).startswith("library: torch won the tuning of 64x32x64")
    assert "whose range of M is 17 to 64" in explained(40) and explained(65).startswith("fallback: ")
    kernels.binders[TABLE[1].problem, 2] = lambda m: Support("another binary")
    assert explained(7).startswith("fallback: ") and "M 7: another binary" in explained(7)


def test_what_takes_long_to_load_serves_no_other_m_that_is_not_frequent(gpu: Gpu) -> None:
    """An algorithm of a library, and PyTorch's own kernel: prompts are of any length, and each M costs milliseconds."""
    dispatcher, empty = gpu
    row = record(problem(1024, 32, 64), ALGORITHM, winner="blaslt", m_from=2)
    dispatcher.load([row, record(problem(2048, 32, 64), winner="torch", m_from=1025)])
    kernels = attach_device(dispatcher, torch_kernel=StandInKernel())
    kernels.loaded_ranges[row.problem], kernels.binders[row.problem, 2] = StandInKernel(), lambda m: StandInKernel()

    def answers(frequent: bool) -> list[tuple[str, bool]]:
        calls = [(empty(m, 64), empty(32, 64)) for m in (1024, 600, 1500, 2048)]
        found = [dispatcher.explain(*call, frequent=frequent).resolution for call in calls]
        return [(one.kind, one.kernel is not None) for one in found]

    assert answers(False) == [("exact", True), ("fallback", False), ("library", False), ("library", True)]
    assert answers(True) == [("exact", True), ("range", True), ("library", True), ("library", True)]


@each(("returns", "often"), [(None, [16, 512]), (lambda rows: rows == 777, [777])])
def test_a_function_says_which_m_are_frequent(gpu: Gpu, monkeypatch: Patch, returns: Any, often: list[int]) -> None:
    dispatcher, empty = gpu
    asked: list[bool] = []

    def explain(*given: Any, frequent: bool) -> CallAnswers:
        asked.append(frequent)
        return CallAnswers.pytorch("")

    monkeypatch.setattr(dispatcher, "explain", explain)
    monkeypatch.setattr("tritongemm.serving.tuned_calls.is_watched", lambda: False)  # fake tensors are one
    dispatcher.weights = frozenset({(32, 64)})
    calls = TunedCalls(dispatcher, torch.nn.functional.linear, returns)
    with torch.no_grad():
        assert not any(calls.find(empty(m, 64), empty(32, 64)) for m in (16, 512, 513, 777))
    assert asked == [m in often for m in (16, 512, 513, 777)]


def test_what_is_found_at_an_m_holds_for_its_span(gpu: Gpu, monkeypatch: Patch) -> None:
    """A row among the M of another ends that: no M is passed over that has a row of its own."""
    dispatcher, empty = gpu
    won = [record(problem(high, 32, 64), winner="torch", m_from=low) for low, high in ((600, 699), (700, 999))]
    dispatcher.load([*won, record(problem(800, 32, 64))])
    kernels = attach_device(dispatcher)
    assert [len(kernels.span(problem(m, 32, 64))) for m in (650, 750, 800, 1000)] == [100, 0, 0, 0]
    monkeypatch.setattr("tritongemm.serving.tuned_calls.is_watched", lambda: False)  # fake tensors are
    asked, explain = list[int](), dispatcher.explain

    def count(x: Any, w: Any, bias: Any, out_dtype: Any, frequent: bool) -> CallAnswers:
        asked.append(len(x))
        return explain(x, w, bias, out_dtype, frequent)

    monkeypatch.setattr(dispatcher, "explain", count)
    calls = TunedCalls(dispatcher, torch.nn.functional.linear)
    with torch.no_grad():
        assert not any(calls.find(empty(m, 64), empty(32, 64)) for m in (650, 699, 600, 650, 700, 701, 700))
    assert asked == [650, 700, 701]


def test_a_prompt_of_a_rows_own_m_is_served_whichever_was_first(gpu: Gpu, monkeypatch: Patch) -> None:
    """An algorithm is loaded at its own M; and a row of x is of two layouts, of which the other has rows of its own."""
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.serving.tuned_calls.is_watched", lambda: False)  # fake tensors are
    algorithm = record(problem(1024, 32, 64), ALGORITHM, winner="blaslt", m_from=513)
    reading = DENSE.read(DENSE.check(DenseOperands(empty(1, 64), empty(32, 64))))
    assert isinstance(reading, Reading)
    dispatcher.load(
        [algorithm, record(problem(5, 32, 64)), record(reading.problems[1].at(64), winner="torch", m_from=1)]
    )
    kernels = attach_device(dispatcher, {problem(5, 32, 64): StandInKernel()})
    kernels.loaded_ranges[algorithm.problem] = StandInKernel()
    calls = TunedCalls(dispatcher, torch.nn.functional.linear, lambda rows: False)
    with torch.no_grad():
        assert [calls.find(empty(m, 64), empty(32, 64)) is not None for m in (600, 1024, 1, 5)] == [
            False, True, False, True,
        ]  # fmt: skip


# Kernels that other tests compile too.
ROWS = (
    record(problem(200, 48, 160), m_from=1),
    record(problem(200, 48, 160, "n"), Config("tma", 64, 64, 64, num_warps=4, num_stages=2), m_from=1),
    record(problem(200, 64, 128), Config("persistent", 64, 64, 64, num_warps=4, num_stages=2), m_from=1),
)


@each("row", ROWS)
def test_one_binary_serves_every_m_of_a_range(row: Record) -> None:
    """The launch at another M is that of a kernel compiled for it: its grid, sizes and workspace, never padded."""
    cache = ArtifactCache(settings.cache_folder())
    prepared = prepare.prepare_kernels([row], SM90, cache)[row.problem]
    assert not isinstance(prepared, Support) and prepared.serves(row.m_from)
    for m in (1, 33, 199):
        own: Record = replace(row, problem=replace(row.problem, m=m), m_from=0)
        assert prepared.launch_at(m) == prepare.prepare_launches([own], SM90, cache)[own.problem]
        launch = prepared.launch_at(m)
        assert isinstance(launch, Launch) and m in [p.value for p in launch.params if p.kind == "i32"]


def test_a_range_that_needs_several_binaries_is_not_served() -> None:
    """Of a column-major A the compiler knows what divides M."""
    row = record(problem(64, 96, 128).stored(False, False), m_from=33)
    prepared = prepare.prepare_kernels([row], SM90, ArtifactCache(settings.cache_folder()))[row.problem]
    assert not isinstance(prepared, Support), str(prepared)
    assert str(prepared.serves(33)) == "M 33 needs another binary than M 64"
