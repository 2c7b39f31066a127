import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Artifact, Evaluator, Machine, Patch, Record, Trial, cases, each, loader, results_format
from tests.support.refusals import fails, refuses
from tests.support.stand_in_campaigns import algorithm, stored
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.campaigns.campaign import MERGED, MeasuringTools
from tritongemm.campaigns.comparison import TURNS
from tritongemm.campaigns.served_kernel import own_choice
from tritongemm.campaigns.stages import benchmark
from tritongemm.campaigns.stages import benchmark as benchmark_stage
from tritongemm.campaigns.stages import filter as filter_stage
from tritongemm.campaigns.stages.benchmark import RAW
from tritongemm.campaigns.stages.filter import DROPPED, FINAL, KEPT, LIBRARY, run_filter
from tritongemm.campaigns.tables import GEMMS, SUMMARY
from tritongemm.campaigns.uplift import ComparedProduct
from tritongemm.core.errors import InputError, OutputError, TritonGemmError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.protocol import MeasureProtocol, RaceResult
from tritongemm.export.library.storage import MANIFEST, is_library, open_library
from tritongemm.system import settings

pytestmark = pytest.mark.usefixtures("without_gpu")


MACHINE = Machine(loader.load_target("gfx942"), "amd", (0, 1), "AMD Instinct MI300X", "")
PROBLEMS = [Problem(16 * (i + 1), 64, 128, *matrices("bf16", layout="TN")) for i in range(5)]


class Device(FakeEvaluator):
    """A GPU on which algorithm `n` takes `10 - n` us and the library 10 us, which notes what its processes did."""

    def __init__(self, log: list[tuple[int, list[str]]], device: int, wrong: Sequence[str] = ()) -> None:
        super().__init__(seconds=lambda config: (10 - config.option("index")) * 1e-6)
        self.wrong, self.names = wrong, list[str]()
        log.append((device, self.names))

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        assert not baseline and len(artifacts) == 1, "a side by itself"
        result = super().race(problem, artifacts, baseline, brief)
        name = artifacts[0].config.template
        self.names.append(f"{problem.m}:{name}")
        if name in self.wrong:
            trial = Trial(artifacts[0].config, "wrong", "error 1 > 0.1", stage="final", error=1.0, tolerance=0.1)
            return RaceResult((trial,), {}, True)
        return result


def campaign(folder: Path, records: Sequence[Record], calls: Callable[[int], int] = lambda i: i + 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / MERGED).write_text(results_format().write(records), encoding="utf-8")
    rows = [f"T,N,{r.problem.n},{r.problem.m},{r.problem.key},{calls(i)}" for i, r in enumerate(records)]
    (folder / GEMMS).write_text("\n".join(["transA,transB,m,n,problem,call_count", *rows, ""]), encoding="utf-8")
    return folder


def measured(
    folder: Path, opener: Callable[[int], Evaluator], devices: int = 2, say: Callable[[str], None] = lambda text: None
) -> list[ComparedProduct]:
    openers = [lambda device=device: opener(device) for device in range(devices)]
    with closing(BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)) as pool:
        return benchmark.measure(folder, MeasuringTools(MACHINE, openers, pool, MeasureProtocol()), say)


def test_sides_take_turns_in_new_processes(tmp_path: Path) -> None:
    """Each process measures one side; a library's win is measured by its reference alone."""
    records = [stored(problem, i) for i, problem in enumerate(PROBLEMS[:4])]
    records.append(stored(PROBLEMS[4], 9, winner="torch"))
    folder, log = campaign(tmp_path / "tunings", records), list[tuple[int, list[str]]]()
    products = measured(folder, lambda device: Device(log, device))
    for device in (0, 1):
        sides = [{name.split(":")[1] == "default" for name in names} for number, names in log if number == device]
        assert sides == [{True}, {False}] * TURNS, "reference, tuned, reference, …"
    assert sum(len(names) for _, names in log) == TURNS * (5 + 4)
    assert [p.ratio for p in products] == [pytest.approx(10 / (10 - i)) for i in range(4)] + [1.0]
    assert not products[4].kernel_changed and products[4].kernel_tuned == own_choice().name
    rows = list(csv.DictReader((folder / RAW).open(encoding="utf-8")))
    assert [row["call_count"] for row in rows] == list("12345") and rows[0]["transA"] == "T" and rows[0]["n"] == "16"
    assert rows[1]["samples_us_reference"] == ";".join(["10"] * TURNS)


def test_what_gained_is_kept_and_the_uplift_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    records = [stored(problem, i) for i, problem in enumerate(PROBLEMS)]
    folder, said = campaign(tmp_path / "tunings", records), list[str]()
    summary = [f"{r.problem.key},{10 * (i + 1)},model" for i, r in enumerate(records)]
    lines = ["problem,total (us),baseline", *summary, "1x2x3,50,measured", ",30,roofline", ""]
    (folder / SUMMARY).write_text("\n".join(lines), encoding="utf-8")
    measured(folder, lambda device: Device([], device, wrong=["Cijk_3"]))
    uplift = run_filter(folder, said.append)
    kept = [row["problem"] for row in csv.DictReader((folder / KEPT).open(encoding="utf-8"))]
    dropped = {r["problem"]: r["dropped"] for r in csv.DictReader((folder / DROPPED).open(encoding="utf-8"))}
    assert kept == [PROBLEMS[i].key for i in (1, 2, 4)]
    assert dropped == {
        PROBLEMS[0].key: "ratio 1.000 is less than 1.03",
        PROBLEMS[3].key: "the tuned kernel: wrong: error 1 > 0.1",
    }
    # Each call takes 10 us untuned; calls are 1 to 5, and 80 us of the log were not compared.
    assert uplift.weighted == pytest.approx((2 * 1 + 3 * 2 + 5 * 4) / (150 + 80))
    shares = [float(row["pct_of_total"]) for row in csv.DictReader((folder / KEPT).open(encoding="utf-8"))]
    assert shares == [pytest.approx(100 * count * 10 / 230, abs=1e-4) for count in (2, 3, 5)]
    assert [r.problem for r in benchmark.read_records(folder / FINAL)] == [PROBLEMS[i] for i in (1, 2, 4)]
    assert "3 of 5 GEMMs kept" in said[0] and "12.17%" in said[0]
    assert said[1].startswith("13.0% of the GEMM time was not compared and is an estimate")
    monkeypatch.setattr("tritongemm.campaigns.uplift.LEAST_RATIO", 100)
    assert run_filter(folder, said.append).kept == 0 and not (folder / FINAL).exists()


def test_a_killed_benchmark_goes_on(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    class Dying(Device):
        left = 11

        def race(self, *args: object, **more: object) -> RaceResult:
            Dying.left -= 1
            if Dying.left < 0:
                raise KilledError
            return super().race(*args, **more)  # type: ignore[arg-type]

    records, log = [stored(problem, i + 1) for i, problem in enumerate(PROBLEMS)], list[tuple[int, list[str]]]()
    folder = campaign(tmp_path / "tunings", records)
    fails(KilledError, "", measured, folder, lambda device: Dying(log, device), devices=1)
    assert not (folder / RAW).exists()
    journal = folder / "results" / "raw_results.yaml.journal"
    with journal.open("ab") as torn:
        torn.write(b'{"problem": {"m": 16, "n"')
    again = list[tuple[int, list[str]]]()
    products = measured(folder, lambda device: Device(again, device), devices=1)
    assert sum(len(names) for _, names in again) == TURNS * 10 - 11
    assert all(len(p.samples_reference) == len(p.samples_tuned) == TURNS for p in products)
    third = list[tuple[int, list[str]]]()
    measured(folder, lambda device: Device(third, device), devices=1)
    assert not third, "all is there"
    campaign(folder, [replace(records[0], config=algorithm(7)), *records[1:]])
    refuses(r"another kernel of 16x64x128_bf16_TN than .*run --only benchmark again", run_filter, folder, print)
    measured(folder, lambda device: Device(third, device), devices=1)
    assert sum(len(names) for _, names in third) == TURNS * 10 and journal.with_name(journal.name + ".old").exists()


def test_a_gpu_that_vanishes_costs_what_it_ran(tmp_path: Path) -> None:
    class Vanished(Device):
        def race(self, *args: object, **more: object) -> RaceResult:
            raise TritonGemmError("cuInit failed: CUDA_ERROR_NO_DEVICE (100)")

    folder = campaign(tmp_path / "tunings", [stored(problem, i + 1) for i, problem in enumerate(PROBLEMS)])
    products = measured(folder, lambda device: (Vanished if device else Device)([], device))
    lost = [p for p in products if p.failure]
    assert len(lost) == 2 and all("the reference: cuInit failed" in p.failure for p in lost)
    assert not any(p.failure for p in measured(folder, lambda device: Device([], device)))


@cases(
    (GEMMS, "problem,call_count\n{key},0\n", r"gemms.csv: row 1 \(line 2\) call_count must be above 0"),
    (GEMMS, "problem,call_count\n{key},2\n{key},3\n", r"row 2 \(line 3\) is of .* equal GEMMs are one row"),
    (GEMMS, "m,n,k\n1,2,3\n", "line 1 has no column problem, call_count"),
    (GEMMS, None, "gemms.csv: there is no such file"),
    (MERGED, "- {M: 16, N: 64, K: 128, dtype_a: bf16}\n", "has no results, only sizes"),
    (MERGED, None, "merged.yaml: there is no such file"),
)
def test_wrong_files_of_a_campaign(name: str, text: str | None, complaint: str, /, tmp_path: Path) -> None:
    folder = campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 1)])
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text.replace("{key}", PROBLEMS[0].key), encoding="utf-8")
    refuses(complaint, measured, folder, lambda device: Device([], device))
    assert not (folder / RAW).exists()


def test_the_stages(tmp_path: Path) -> None:
    reported = Reporting(campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 5)]))
    refuses(r"raw_results.csv: there is no such file", filter_stage.run, reported)
    benchmark_stage.run(reported)
    assert "benchmark: turn 3 of 3, tuned: 1 GEMMs measured" in reported.said
    reported.said.clear()
    filter_stage.run(reported)
    assert "1 of 1 GEMMs kept" in reported.said[0] and "average uplift 100.00%" in reported.said[0]


def test_results_of_another_device(tmp_path: Path) -> None:
    folder = campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 1, compute_units=80)])
    with pytest.raises(InputError, match="no result for gfx942 of 304 compute units; it has some for gfx942 of 80"):
        measured(folder, lambda device: Device([], device))
    assert not (folder / "results").exists(), "nothing is written"


@dataclass
class Reporting:
    folder: Path
    said: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    device: Callable[[], Device] = lambda: Device([], 0)

    @contextmanager
    def open_tools(self, what: str) -> Iterator[MeasuringTools]:
        assert what == "the benchmark"
        with closing(BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)) as pool:
            yield MeasuringTools(MACHINE, [self.device], pool, MeasureProtocol())

    def say(self, text: str) -> None:
        self.said.append(text)

    def fail(self, text: str) -> None:
        self.failed.append(text)


def test_what_could_not_be_compared_is_a_failure_and_tried_again(tmp_path: Path) -> None:
    class Vanished(Device):
        def race(self, *args: object, **more: object) -> RaceResult:
            raise TritonGemmError("the GPU is gone")

    reported = Reporting(campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 5)]), device=lambda: Vanished([], 0))
    benchmark_stage.run(reported)
    assert reported.failed == [f"not compared: {PROBLEMS[0].key}: the reference: the GPU is gone"]
    assert benchmark_stage.why_again(reported) == "1 GEMMs could not be compared: done again"
    benchmark_stage.run(Reporting(reported.folder))
    assert not benchmark_stage.why_again(reported)
    (reported.folder / RAW).write_text("", encoding="utf-8")
    assert benchmark_stage.why_again(reported).endswith("done again")
    benchmark_stage.run(Reporting(reported.folder))
    (reported.folder / RAW).unlink()
    assert "there is no such file: done again" in benchmark_stage.why_again(reported)


def test_what_is_kept_is_a_library(tmp_path: Path, monkeypatch: Patch) -> None:
    reported = Reporting(campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 5)]))
    benchmark_stage.run(reported)
    run_filter(reported.folder, reported.say)
    (entry,) = open_library(reported.folder / LIBRARY).entries
    assert entry.record == benchmark.read_records(reported.folder / FINAL)[0]
    assert reported.said[-1].endswith("final: a library of 1 results, 0 with kernels")
    monkeypatch.setattr("tritongemm.campaigns.uplift.LEAST_RATIO", 100)
    run_filter(reported.folder, reported.say)
    assert not is_library(reported.folder / LIBRARY)


@each("least_ratio", [1.03, 100])
def test_a_library_replaces_nothing_of_others(least_ratio: float, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("tritongemm.campaigns.uplift.LEAST_RATIO", least_ratio)
    reported = Reporting(campaign(tmp_path / "tunings", [stored(PROBLEMS[0], 5)]))
    benchmark_stage.run(reported)
    theirs = reported.folder / LIBRARY / MANIFEST
    theirs.parent.mkdir()
    theirs.write_text('{"mine": 1}', encoding="utf-8")
    fails(OutputError, "is not a manifest of a library", run_filter, reported.folder, reported.say)
    assert theirs.read_text(encoding="utf-8") == '{"mine": 1}'
