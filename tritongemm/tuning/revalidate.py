"""Stored results → verdicts or times, without tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import CompileJobs, brings_kernels
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY, PREDICTED, Trial
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.formats import FormatRow
from tritongemm.plugins.contracts import Evaluator
from tritongemm.report.console import Reporter

HOLDS = 0.02  # a gain that was recorded holds if it is no more than this much smaller when it is timed again


def require_results(rows: Sequence[FormatRow], path: str) -> Sequence[FormatRow]:
    """The rows of the file at `path`, all of which must be results.

    Raises:
        InputError: a row without a config.
    """
    for row in rows:
        if row.config is None:
            raise InputError(f"{path}: {row.problem.key} (line {row.line}) is a size without a config; tune it first")
    return rows


def _built(
    rows: Sequence[FormatRow], judge: Evaluator, compiler: BuildPool, plan: TuningOptions, reporter: Reporter
) -> Iterator[tuple[FormatRow, Artifact]]:
    """Each row's config, compiled."""
    configs = [(row.problem, row.config) for row in rows if row.config is not None]
    factory = CompileJobs(configs, judge.target, plan.folder)
    jobs: list[CompileJob | Artifact] = []
    for problem, config in configs:
        job = factory.job(problem, config) if brings_kernels(config) else Artifact(config, "")
        # E.g. no manifest has its kernel any more.
        jobs.append(
            Artifact(config, "", status="compile_failed", reason=job.reason) if isinstance(job, Support) else job
        )
    wanted = [j for j in jobs if isinstance(j, CompileJob)]
    reporter.stage("compile", len({j.digest for j in wanted}))
    built = {}
    for one in compiler.stream(wanted):
        built[one.digest] = one
        reporter.step("compile")
    for row, job in zip(rows, jobs, strict=True):
        assert row.config is not None
        found = built[job.digest] if isinstance(job, CompileJob) else job
        yield row, replace(found, config=row.config)


def _checked(row: FormatRow, built: Artifact, judge: Evaluator) -> Trial:
    if built.status != "ok":
        return Trial(built.config, built.status, built.reason)
    try:
        (trial,) = judge.verify(row.problem, [built])
        return trial
    except TritonGemmError as error:  # e.g. its operands do not fit; the other rows do
        return Trial(built.config, "crashed", str(error))


def verify_results(
    rows: Sequence[FormatRow], judges: Sequence[Evaluator], compiler: BuildPool, plan: TuningOptions, reporter: Reporter
) -> int:
    """Check every stored result; 1 if any is wrong, or can't be run or checked.

    Args:
        rows: stored results.
        judges: what verifies them; the first is used.
        compiler: builds their kernels.
        plan: where generated modules go.
        reporter: prints the table.
    """
    judge, table, bad, unchecked = judges[0], [], 0, 0
    reporter.stage("verify", len(rows))
    for row, built in _built(rows, judge, compiler, plan, reporter):
        trial = _checked(row, built, judge)
        bad += trial.status not in ("ok", "pruned")
        unchecked += trial.status == "pruned"
        error, limit = ("-" if v is None else f"{v:.2e}" for v in (trial.error, trial.tolerance))
        how = judge.describe(row.problem, built.config) if trial.error is not None else "-"
        table.append([row.problem.key, trial.status, error, limit, how, built.config.short_name, trial.reason])
        reporter.step("verify")
    reporter.table("", ["size", "status", "error", "allowed", "checked", "config", "why"], table)
    others = [f", {count} {what}" for count, what in ((bad, "are not"), (unchecked, "can't be checked here")) if count]
    reporter.say(f"{len(table) - bad - unchecked} of {len(table)} results are right{''.join(others)}")
    return 1 if bad or unchecked else 0


def retime_results(
    rows: Sequence[FormatRow], judges: Sequence[Evaluator], compiler: BuildPool, plan: TuningOptions, reporter: Reporter
) -> int:
    """Time every stored result beside the library, and say whether the gains that it records hold; 1 if any can't be timed.

    Args:
        rows: stored results.
        judges: what times them; the first is used.
        compiler: builds their kernels.
        plan: names the library, and where generated modules go.
        reporter: prints the table.
    """
    judge, table, bad = judges[0], [], 0
    kept: list[bool] = []
    reporter.stage("time", len(rows))
    for row, built in _built(rows, judge, compiler, plan, reporter):
        reporter.step("time")
        trial, library = _timed(row, built, judge, plan)
        stored = [
            f"{row.record.seconds * 1e6:.2f}" if row.record else "-",
            _ratio(row.record.speedup if row.record else None),
        ]
        if trial.status != "ok":
            bad += 1
            table.append(
                [
                    row.problem.key,
                    "-",
                    stored[0],
                    "-",
                    "-",
                    "-",
                    stored[1],
                    trial.status,
                    built.config.short_name,
                    trial.reason,
                ]
            )
            continue
        gain = library / trial.seconds if library else None
        rate = row.problem.flops / trial.seconds / 1e12
        theirs = f"{library * 1e6:.2f}" if library else "-"
        times = [f"{trial.seconds * 1e6:.2f}", stored[0], f"{rate:.1f}", theirs, _ratio(gain), stored[1]]
        table.append([row.problem.key, *times, trial.timer, built.config.short_name, ""])
        won = row.record is not None and row.record.winner == built.config.backend
        if won and gain and row.record and row.record.speedup:
            kept.append(gain >= (1 - HOLDS) * row.record.speedup)
    columns = ["size", "us", "stored us", "TFLOPS", "library us", "ratio", "stored ratio", "timer", "config", "why"]
    guessed = any(PREDICTED in line for line in table)
    reporter.table(f"Predicted, not measured (timer: {PREDICTED})" if guessed else "", columns, table)
    if kept:
        share = sum(kept) / len(kept)
        reporter.say(f"{sum(kept)} of {len(kept)} recorded gains hold within {HOLDS:.0%} ({share:.0%})")
    return 1 if bad else 0


def _timed(row: FormatRow, built: Artifact, judge: Evaluator, plan: TuningOptions) -> tuple[Trial, float | None]:
    """A stored config's trial, and the library's seconds beside it."""
    if built.status != "ok":
        return Trial(built.config, built.status, built.reason), None
    try:
        final = judge.race(row.problem, [built], plan.library)
    except TritonGemmError as error:
        return Trial(built.config, "crashed", str(error)), None
    library = final.samples.get(BASELINE_ENTRY)
    return final.trials[0], median(library) if library else None


def _ratio(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"
