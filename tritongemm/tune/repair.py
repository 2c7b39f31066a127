"""Repair of stale results, each of which races again with the configs that were fast at similar sizes."""

import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace

from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator
from tritongemm.plugins.validity import check_config
from tritongemm.tune.final_race import race_again
from tritongemm.tune.free_devices import work_when_free
from tritongemm.tune.options import TuningOptions

OWN, NEAREST = 6, 6  # configs beside a result's own: the fastest of its own trials, and winners of the nearest sizes


def list_neighbours(record: Record, records: Iterable[Record], trials: Iterable[Trial]) -> list[Config]:
    """List the configs that are raced for a result: its own, then those that were fast at its and similar sizes."""
    passed = [t for t in trials if t.status == "ok" and t.samples]
    passed.sort(key=lambda t: (t.stage != "final", t.seconds))
    same = [r for r in records if _kind(r.problem) == _kind(record.problem) and r.target == record.target]
    nearest = sorted(same, key=lambda r: _distance(r.problem, record.problem))
    own = list(dict.fromkeys(t.config for t in passed))[:OWN]
    others = [c for c in dict.fromkeys(r.config for r in nearest) if c not in own and c != record.config][:NEAREST]
    return list(dict.fromkeys([record.config, *own, *others]))


def _kind(problem: Problem) -> Problem:
    """Return what neighbours share: all but sizes and how rows are spread."""
    groups = problem.groups and Groups(problem.groups.count, min(problem.groups.room, 1))
    return replace(problem, m=1, n=1, k=1, groups=groups)


def _distance(one: Problem, other: Problem) -> float:
    pairs = ((one.m, other.m), (one.n, other.n), (one.k, other.k))
    return sum(abs(math.log(a / b)) for a, b in pairs)


class Repair:
    """Races stale results again, on all devices at once.

    `keep` replaces a stale result by a new one, or says why it can't; the device starts no other race meanwhile, so
    that an interruption loses no finished result. `say` is called with a line about each device that is given up.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        pool: BuildPool,
        options: TuningOptions,
        keep: Callable[[Record, Record], Support],
        say: Callable[[str], None],
    ) -> None:
        self._evaluators, self._pool, self._options, self._say = evaluators, pool, options, say
        self._target, self._keep, self._keeping = evaluators[0].target, keep, threading.Lock()

    def repair(
        self, stale: Sequence[Record], records: Sequence[Record], trials: Mapping[Problem, Sequence[Trial]]
    ) -> Generator[tuple[Record, Record | Support], None, None]:
        """Yield each stale result with its replacement, or why there is none, as soon as that is known."""
        wanted = {id(r): list_neighbours(r, records, trials.get(r.problem, ())) for r in stale}
        jobs = {id(r): self._jobs(r, wanted[id(r)]) for r in stale}
        every = (job for found in jobs.values() for _, job in found if job is not None)
        by_digest = {artifact.digest: artifact for artifact in self._pool.stream(every)}

        def race(evaluator: Evaluator, record: Record) -> Record | Support:
            artifacts = [
                Artifact(config, "") if job is None else replace(by_digest[job.digest], config=config)
                for config, job in jobs[id(record)]
            ]
            made = self._race(evaluator, record, [artifact for artifact in artifacts if artifact.status == "ok"])
            if isinstance(made, Support):
                return made
            with self._keeping:
                kept = self._keep(record, made)
            return made if kept else kept

        yield from work_when_free(self._evaluators, stale, race, self._say)

    def _jobs(self, record: Record, configs: Iterable[Config]) -> list[tuple[Config, CompileJob | None]]:
        """Return the compile jobs of configs that can serve a record, or its range of M; or None."""
        target, found = self._target, list[tuple[Config, CompileJob | None]]()
        for config in configs:
            if not check_config(config, record.problem, target):
                continue
            if not brings_kernels(config):
                found.append((config, None))
                continue
            job = compile_job(record.problem, config, target)
            least = compile_job(record.problem.at(record.m_from), config, target) if record.m_from else job
            if isinstance(job, CompileJob) and isinstance(least, CompileJob) and job.digest == least.digest:
                found.append((config, job))
        return found

    def _race(self, evaluator: Evaluator, record: Record, artifacts: Sequence[Artifact]) -> Record | Support:
        if not artifacts:
            return Support("none of its neighbours can be compiled")
        made = race_again(evaluator, record.problem, artifacts, self._options)
        if isinstance(made, Support):
            return Support(f"none of its neighbours passed: {made.reason}")
        return replace(made, m_from=record.m_from, quantize_seconds=record.quantize_seconds, notes=record.notes)
