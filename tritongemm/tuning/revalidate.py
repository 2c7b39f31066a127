"""Stored results → what they give when they are run again, without tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.plugins.contracts import Evaluator, Watcher
from tritongemm.results.revalidation import RetimedResult, VerifiedResult


def require_results(rows: Sequence[FormatRow], path: str) -> Sequence[FormatRow]:
    """The rows of the file at `path`, all of which must be results.

    Raises:
        InputError: a row without a config.
    """
    for row in rows:
        if row.config is None:
            raise InputError(f"{path}: {row.problem.key} (line {row.line}) is a size without a config; tune it first")
    return rows


class Revalidation:
    """Runs stored results again.

    Args:
        evaluator: what verifies and times them.
        pool: compiles their kernels.
        watcher: told of the progress.
    """

    def __init__(self, evaluator: Evaluator, pool: BuildPool, watcher: Watcher) -> None:
        self.evaluator, self.pool, self.watcher = evaluator, pool, watcher

    def verify(self, rows: Sequence[FormatRow]) -> list[VerifiedResult]:
        """Check every result; one that can't be run costs itself."""
        self.watcher.stage("verify", len(rows))
        results = []
        for row, artifact in self._compiled(rows):
            trial = self._verified(row, artifact)
            checked = trial.error is not None
            how = self.evaluator.describe(row.problem, artifact.config) if checked else ""
            results.append(VerifiedResult(row.problem, trial, how))
            self.watcher.step("verify")
        return results

    def retime(self, rows: Sequence[FormatRow], baseline: str) -> list[RetimedResult]:
        """Time every result beside a baseline backend; one that can't be run costs itself."""
        self.watcher.stage("time", len(rows))
        results = []
        for row, artifact in self._compiled(rows):
            results.append(self._retimed(row, artifact, baseline))
            self.watcher.step("time")
        return results

    def _compiled(self, rows: Sequence[FormatRow]) -> Iterator[tuple[FormatRow, Artifact]]:
        """Each row with its config's artifact."""
        configs = [(row.problem, row.config) for row in rows if row.config is not None]
        jobs: list[CompileJob | Artifact] = []
        for problem, config in configs:
            made = compile_job(problem, config, self.evaluator.target) if brings_kernels(config) else None
            job = Artifact(config, "") if made is None else made
            if isinstance(job, Support):  # e.g. no manifest has its kernel any more
                job = Artifact(config, "", status="compile_failed", reason=job.reason)
            jobs.append(job)
        wanted = [job for job in jobs if isinstance(job, CompileJob)]
        self.watcher.stage("compile", len({job.digest for job in wanted}))
        by_digest: dict[str, Artifact] = {}
        for artifact in self.pool.stream(wanted):
            by_digest[artifact.digest] = artifact
            self.watcher.step("compile")
        for row, (_, config), job in zip(rows, configs, jobs, strict=True):
            artifact = by_digest[job.digest] if isinstance(job, CompileJob) else job
            yield row, replace(artifact, config=config)

    def _verified(self, row: FormatRow, artifact: Artifact) -> Trial:
        if artifact.status != "ok":
            return artifact.failed_trial()
        try:
            (trial,) = self.evaluator.verify(row.problem, [artifact])
        except TritonGemmError as error:  # e.g. its operands do not fit; the other rows do
            return Trial(artifact.config, "crashed", str(error))
        return trial

    def _retimed(self, row: FormatRow, artifact: Artifact, baseline: str) -> RetimedResult:
        if artifact.status != "ok":
            return RetimedResult(row.problem, artifact.failed_trial(), None, row.record)
        try:
            race = self.evaluator.race(row.problem, [artifact], baseline)
        except TritonGemmError as error:
            return RetimedResult(row.problem, Trial(artifact.config, "crashed", str(error)), None, row.record)
        samples = race.samples.get(BASELINE_ENTRY)
        return RetimedResult(row.problem, race.trials[0], median(samples) if samples else None, row.record)
