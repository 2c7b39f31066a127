"""The time of quantising A beside a race: for which problems, what it says, and that it costs a race nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import raising
from tests.support.linear_layers import record
from tests.support.nouns import Artifact, Capsys, Defaults, Family, Groups, Patch, Record, cases, loader, registry
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.helpers import compile_helper
from tritongemm.build.pool import BuildPool
from tritongemm.build.quantization_kernels import Quantization, choose_kernels
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.protocol import RaceResult
from tritongemm.formats import results_format
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.report.console import Reporter
from tritongemm.system import settings
from tritongemm.tune import quantization
from tritongemm.tune.device_queue import CompileQueue
from tritongemm.workloads import sizes

OCP, FP4 = "fp8e4m3fn", "fp4e2m1"


def problem(family: str, scales: str = "", dtype: str = OCP, **changes: Any) -> Problem:
    made: Problem = registry.get(Family, family).problem(
        Problem(16, 256, 512, *matrices(dtype, c="bf16", layout="TN"), **changes), scales
    )
    return made


@cases(
    (problem("a8w8"), "row", (1, 1)),
    (problem("a8w8_blockscale"), "block", (1, 16)),
    (problem("a8w8_blockscale", "block_rows"), "block", (4, 1)),
    (problem("a8w8_blockscale", "mx"), "mx", (16, 16)),
    (problem("a8w8_blockscale", "mx_shuffled"), "mx", (32, 16)),
    (problem("a4w4_blockscale", dtype=FP4), "mx", (32, 16)),
    (problem("a8w8", "tensor"), "tensor", (1, 1)),
    (problem("a8w8", groups=Groups(2)), "", ()),
    (Problem(16, 256, 512, *matrices("bf16", layout="TN")), "", ()),
)
def test_the_kernel_writes_what_the_product_reads(of: Problem, granularity: str, strides: tuple[int, int], /) -> None:
    wanted = Quantization(16, 512, "bf16", of.a.dtype, granularity, strides) if granularity else None
    if granularity == "mx" and wanted and of.a.scaling:
        wanted = replace(wanted, places=scale_places(of.a.scaling.layout))
    assert quantization.quantization_of(of) == wanted
    for helper, arguments in choose_kernels(wanted) if wanted else ():
        assert set(arguments.numbers) <= set(helper.signature) and arguments.grid[0] > 0


class Evaluator:
    times_quantization = True
    target = loader.load_target("sm90")

    def time_quantization(self, problem: Problem, launches: Any) -> float:
        assert launches == ("launch",)
        return 3e-6


def test_a_race_gets_the_time_and_never_fails_by_it(monkeypatch: Patch) -> None:
    result, evaluator = RaceResult((), {"a": (1e-6,)}, cold=True), Evaluator()
    monkeypatch.setattr(quantization, "_launches", lambda asked, target: ("launch",))
    timed: Any = quantization.with_quantization(result, problem("a8w8"), evaluator)  # type: ignore[arg-type]
    assert timed == replace(result, quantize_seconds=3e-6)
    monkeypatch.setattr(quantization, "_launches", raising(InputError("it does not compile")))
    assert quantization.with_quantization(result, problem("a8w8"), evaluator) == result  # type: ignore[arg-type]
    # What multiplies OCP's fp8 as wider numbers has no instruction that converts to it.
    monkeypatch.setattr(evaluator, "target", loader.load_target("gfx942"))
    monkeypatch.setattr(quantization, "_launches", lambda asked, target: ("launch",))
    for one, seconds in ((problem("a8w8_blockscale", "mx"), None), (problem("a4w4_blockscale", dtype=FP4), 3e-6)):
        timed = quantization.with_quantization(result, one, evaluator)  # type: ignore[arg-type]
        assert timed.quantize_seconds == seconds


def test_a_run_compiles_its_kernels_before_the_race(tmp_path: Path, monkeypatch: Patch) -> None:
    """Once for all problems that share one; a timer that can't measure them, or a plain product, asks for none."""
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path))
    evaluator, queue = Evaluator(), CompileQueue()
    one, plain = problem("a8w8"), Problem(16, 256, 512, *matrices("bf16", layout="TN"))
    for product in (one, replace(one, n=512), plain):
        queue.put_ahead(quantization.compile_jobs(product, evaluator), turn=3)  # type: ignore[arg-type]
    queue.end()
    (job,) = queue.draw()
    assert queue.turn(job.digest) == 3 and not queue.take(job.digest)
    cached = ArtifactCache(settings.cache_folder())
    cached.put(Artifact(job.config, job.digest, symbol="quantize_rows", threads=128), b"code", "a.cubin")
    monkeypatch.setattr(BuildPool, "build", lambda self, job: pytest.fail("it was compiled before"))
    asked = quantization.quantization_of(one)
    ((helper, _),) = choose_kernels(asked) if asked else ()
    assert compile_helper(helper, evaluator.target, cached).symbol == "quantize_rows"
    monkeypatch.setattr(evaluator, "times_quantization", False)
    assert not quantization.compile_jobs(one, evaluator)  # type: ignore[arg-type]


def test_files_and_tables_have_both_times(tmp_path: Path, capsys: Capsys) -> None:
    fp8 = record(problem("a8w8"), quantize_seconds=1.5e-6)
    plain = record(Problem(16, 256, 512, *matrices("bf16", layout="TN")))
    assert fp8.seconds_with_quantization == pytest.approx(3.5e-6) and plain.seconds_with_quantization is None
    assert Record.from_json(fp8.to_json()) == fp8 and "quantize_seconds" not in plain.to_json()
    file = tmp_path / "tuned.yaml"
    file.write_text(results_format().write([fp8, plain]), encoding="utf-8")
    assert [row.record for row in sizes.from_file(file, Defaults())] == [fp8, plain]
    assert file.read_text(encoding="utf-8").count("quantize_us") == 1
    Reporter().records([fp8, plain], loader.load_target("sm90"), compare=True)
    reported = capsys.readouterr().out
    assert "quantise us" in reported and "3.50" in reported and "0.571" in reported  # bf16's 2 us over both
