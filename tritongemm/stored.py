"""Stored results → verdicts or times, without tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from tritongemm import choose, generate, opponents, registry
from tritongemm.compile import Compiler, Job
from tritongemm.config import Config
from tritongemm.errors import InputError, TritonGemmError
from tritongemm.problem import Problem
from tritongemm.report import Reporter
from tritongemm.sizes import Row
from tritongemm.task import Judge, Plan
from tritongemm.trial import Built, Trial


def _built(
    rows: Sequence[Row], judge: Judge, compiler: Compiler, plan: Plan, reporter: Reporter
) -> Iterator[tuple[Row, Built]]:
    """Each row's config, compiled.

    Raises:
        InputError: a row without a config.
    """
    jobs: list[Job | Built | None] = []
    alike: dict[tuple[Problem, str], list[Config]] = {}  # one problem's results on several targets share a module
    for row in rows:
        if row.config is not None:
            alike.setdefault((row.problem, row.config.backend), []).append(row.config)
    for row in rows:
        if row.config is None:
            raise InputError(f"{row.problem.key} (line {row.line}) is a size without a config; tune it first")
        backend = registry.load("backends", row.config.backend)
        if not hasattr(backend, "job"):  # a library brings its own kernels
            jobs.append(None)
            continue
        module = plan.folder
        if row.config.backend == opponents.SEARCHED:
            configs = list(dict.fromkeys(alike[row.problem, row.config.backend]))
            module = generate.module(row.problem, configs, judge.target, plan.folder)
        try:
            jobs.append(backend.job(row.config, row.problem, judge.target, str(module)))
        except (TritonGemmError, OSError) as error:  # e.g. no manifest has its kernel any more
            jobs.append(Built(row.config, "", status="compile_failed", reason=str(error)))
    wanted = [j for j in jobs if isinstance(j, Job)]
    reporter.stage("compile", len({j.digest for j in wanted}))
    built = {}
    for one in compiler.stream(wanted):
        built[one.digest] = one
        reporter.step("compile")
    for row, job in zip(rows, jobs, strict=True):
        assert row.config is not None
        found = built[job.digest] if isinstance(job, Job) else job or Built(row.config, "")
        yield row, replace(found, config=row.config)


def check(rows: Sequence[Row], judges: Sequence[Judge], compiler: Compiler, plan: Plan, reporter: Reporter) -> int:
    """Check every stored result; 1 if any is wrong or can't be run.

    Args:
        rows: stored results.
        judges: what verifies them; the first is used.
        compiler: builds their kernels.
        plan: where generated modules go.
        reporter: prints the table.
    """
    judge, table, bad = judges[0], [], 0
    reporter.stage("verify", len(rows))
    for row, built in _built(rows, judge, compiler, plan, reporter):
        if built.status == "ok":
            (trial,) = judge.check(row.problem, [built])
        else:
            trial = Trial(built.config, built.status, built.reason)
        bad += trial.status != "ok"
        error, limit = ("-" if v is None else f"{v:.2e}" for v in (trial.error, trial.tolerance))
        how = judge.describe(row.problem, built.config) if trial.error is not None else "-"
        table.append([row.problem.key, trial.status, error, limit, how, built.config.name, trial.reason])
        reporter.step("verify")
    reporter.table("", ["size", "status", "error", "allowed", "checked", "config", "why"], table)
    reporter.say(f"{len(table) - bad} of {len(table)} results are right" + (f", {bad} are not" if bad else ""))
    return 1 if bad else 0


def benchmark(rows: Sequence[Row], judges: Sequence[Judge], compiler: Compiler, plan: Plan, reporter: Reporter) -> int:
    """Time every stored result beside the library; 1 if any can't be timed."""
    judge, table, bad = judges[0], [], 0
    reporter.stage("time", len(rows))
    for row, built in _built(rows, judge, compiler, plan, reporter):
        reporter.step("time")
        final = judge.final(row.problem, [built], plan.library) if built.status == "ok" else None
        trial = final.trials[0] if final else Trial(built.config, built.status, built.reason)
        if final is None or trial.status != "ok":
            bad += 1
            table.append([row.problem.key, "-", "-", "-", "-", trial.status, built.config.name, trial.reason])
            continue
        library = final.samples.get(choose.LIBRARY)
        theirs = median(library) if library else None
        rate = row.problem.flops / trial.seconds / 1e12
        times = [f"{trial.seconds * 1e6:.2f}", f"{rate:.1f}"]
        times += [f"{theirs * 1e6:.2f}", f"{theirs / trial.seconds:.3f}"] if theirs else ["-", "-"]
        table.append([row.problem.key, *times, trial.timer, built.config.name, ""])
    reporter.table("", ["size", "us", "TFLOPS", "library us", "ratio", "timer", "config", "why"], table)
    return 1 if bad else 0
