"""Verification and timing of stored results, without tuning."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import brings_kernels, compile_job, or_refusal
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.plugins.contracts import Evaluator, Watcher
from tritongemm.plugins.validity import check_config, check_order
from tritongemm.results.revalidation import RetimedResult, VerifiedResult


def require_results(rows: Sequence[FormatRow], path: str) -> Sequence[FormatRow]:
    """Return the rows of the file at `path`, all of which must be results."""
    for row in rows:
        if row.config is None:
            raise InputError(f"{path}: {row.problem.key} (line {row.line}) is a size without a config; tune it first")
    return rows


def compile_rows(
    rows: Sequence[FormatRow], target: Target, pool: BuildPool, watcher: Watcher | None = None
) -> Iterator[tuple[FormatRow, Artifact]]:
    """Yield each row with its config's artifact, which gives the reason if there is nothing to run."""
    configs = [(row.problem, row.config) for row in rows if row.config is not None]
    jobs = [_job(row, config, target) for row, (_, config) in zip(rows, configs, strict=True)]
    wanted = [job for job in jobs if isinstance(job, CompileJob)]
    if watcher is not None:
        watcher.stage("compile", len({job.digest for job in wanted}))
    by_digest: dict[str, Artifact] = {}
    for artifact in pool.stream(wanted):
        by_digest[artifact.digest] = artifact
        if watcher is not None:
            watcher.step("compile")
    for row, (_, config), job in zip(rows, configs, jobs, strict=True):
        artifact = by_digest[job.digest] if isinstance(job, CompileJob) else job
        yield row, replace(artifact, config=config)


def _job(row: FormatRow, config: Config, target: Target) -> CompileJob | Artifact:
    """Return the compile job of a row, or an artifact where there is nothing to compile or the row is refused."""
    possible = check_config(config, row.problem, target, row.target)
    if possible and row.record:
        possible = check_order(row.record, target)
    if not possible:
        return Artifact(config, "", status="refused", reason=possible.reason)
    if not brings_kernels(config):
        return Artifact(config, "")
    job = compile_job(row.problem, config, target)
    if isinstance(job, Support):  # e.g. a compiler or library is missing
        return Artifact(config, "", status="compile_failed", reason=job.reason)
    return job


class Revalidation:
    """Runs stored results again."""

    def __init__(self, evaluator: Evaluator, pool: BuildPool, watcher: Watcher) -> None:
        self.evaluator, self.pool, self.watcher = evaluator, pool, watcher

    def verify(self, rows: Sequence[FormatRow]) -> list[VerifiedResult]:
        """Verify every result; one that can't be run does not affect the others."""
        self.watcher.stage("verify", len(rows))
        results = []
        for row, artifact in compile_rows(rows, self.evaluator.target, self.pool, self.watcher):
            trial = self._verified(row, artifact)
            checked = trial.error is not None
            how = self.evaluator.describe(row.problem, artifact.config) if checked else ""
            results.append(VerifiedResult(row.problem, trial, how))
            self.watcher.step("verify")
        return results

    def retime(self, rows: Sequence[FormatRow], baseline: str) -> list[RetimedResult]:
        """Time every result together with a baseline backend; one that can't be run does not affect the others."""
        self.watcher.stage("time", len(rows))
        results = []
        for row, artifact in compile_rows(rows, self.evaluator.target, self.pool, self.watcher):
            results.append(self._retimed(row, artifact, baseline))
            self.watcher.step("time")
        return results

    def _verified(self, row: FormatRow, artifact: Artifact) -> Trial:
        if artifact.status != "ok":
            return artifact.failed_trial()
        trials = or_refusal(lambda: list(self.evaluator.verify(row.problem, [artifact])))
        if isinstance(trials, Support):  # e.g. its operands do not fit; the other rows do
            return Trial(artifact.config, "crashed", trials.reason)
        return trials[0]

    def _retimed(self, row: FormatRow, artifact: Artifact, baseline: str) -> RetimedResult:
        if artifact.status != "ok":
            return RetimedResult(row.problem, artifact.failed_trial(), None, row.record)
        race = or_refusal(lambda: self.evaluator.race(row.problem, [artifact], baseline))
        if isinstance(race, Support):
            return RetimedResult(row.problem, Trial(artifact.config, "crashed", race.reason), None, row.record)
        samples = race.samples.get(BASELINE_ENTRY)
        seconds = median(samples) if samples else None
        return RetimedResult(row.problem, race.trials[0], seconds, row.record, race.library_wrong)
