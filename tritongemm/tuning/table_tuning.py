"""Stage: tuned sizes of one product → its table over M.

At the M between those that were searched, candidates of their searches race: those that the cost model, scaled to what
was measured at the nearest searched M, expects to be fastest there, the neighbours' winners, and the library's own
guesses. A row serves the M below it down to the last row. Where neighbours differ, their range is measured at its least
M; a result that is too slow there has its range split. Then the rows are tried at M that none of this has seen.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from queue import SimpleQueue
from statistics import fmean, median

from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.plugins.contracts import Evaluator
from tritongemm.plugins.validity import check_config
from tritongemm.search.cost_model import model as cost_model
from tritongemm.tuning import roster
from tritongemm.tuning.m_table import MOST_REGRET, MeasuredM, MTable
from tritongemm.tuning.run import TuningRun
from tritongemm.tuning.task import make_record
from tritongemm.workloads.m_spans import MSpan

EXPECTED = 6  # Kernels that race at an M because they are expected to be the fastest there.
GUESSES = 3  # Algorithms of each library that race there.
HELD_OUT = 8  # M of a table that rows are tried at without having been chosen there.
MOST_TRIES = 2  # Times that other M are held out, where rows failed at the first.
_SCREENED = 24  # Candidates of a searched M, the fastest first, that may race at its neighbours.
_FINEST_RANGE = 1 / 16  # A range that is shorter than this share of its M is split no further.


class TableTuning:
    """Makes tables over M from what a run has tuned.

    Args:
        run: the run, whose devices, compilers and store are used.
    """

    def __init__(self, run: TuningRun) -> None:
        self._run = run
        self._compiling = threading.Lock()
        self._deadline = time.monotonic() + run.options.seconds if run.options.seconds else inf

    def tune(self, spans: Sequence[MSpan]) -> dict[MSpan, MTable]:
        """The tables of spans whose searched M are tuned; their records go to the store.

        Raises:
            OutputError: the store or the cache can't be written.
        """
        self._run.watcher.stage("table", len(spans))
        evaluators: SimpleQueue[Evaluator] = SimpleQueue()
        for evaluator in self._run.evaluators:
            evaluators.put(evaluator)

        def work(span: MSpan) -> MTable:
            evaluator = evaluators.get()
            try:
                return _SpanTuning(self, span, evaluator).table()
            finally:
                evaluators.put(evaluator)
                self._run.watcher.step("table")

        with ThreadPoolExecutor(len(self._run.evaluators)) as pool:
            tables = dict(zip(spans, pool.map(work, spans), strict=True))
        for table in tables.values():
            for record in table.records():
                if self._run.store.record(record.problem) != record:
                    self._run.store.add_record(record)
        return tables

    def in_time(self) -> bool:
        """Whether the run's time is not spent."""
        return time.monotonic() <= self._deadline

    def measured(self, problem: Problem) -> MeasuredM | None:
        """What the store has of a race at one M; None where there was none."""
        record = self._run.store.record(problem)
        if record is None:
            return None
        finals = [t for (_, stage), t in self._run.store.trials(problem).items() if stage == "final" and t.samples]
        return MeasuredM(record, {t.config: t.seconds for t in finals} | {record.config: record.seconds})

    def screened(self, problem: Problem) -> dict[Config, float]:
        """Seconds of the fastest candidates of a searched M, by their last race or screen."""
        trials = sorted(self._run.store.trials(problem).values(), key=lambda t: t.stage)  # a final comes first
        found: dict[Config, float] = {}
        for trial in trials:
            if trial.status == "ok" and trial.samples:
                found.setdefault(trial.config, trial.seconds)
        return dict(sorted(found.items(), key=lambda pair: pair[1])[:_SCREENED])

    def race(self, problem: Problem, configs: Iterable[Config], evaluator: Evaluator) -> MeasuredM | None:
        """Race configs with the baseline at one M; None where none is right there. What is known is not run again."""
        wanted = list(dict.fromkeys(configs))
        known = self.measured(problem)
        if known is not None and all(self._was_tried(problem, config) for config in wanted):
            return known
        artifacts = self._artifacts(problem, [*wanted, *(known.seconds if known else ())], evaluator)
        try:
            result = evaluator.race(problem, artifacts, self._run.options.library) if artifacts else None
        except TritonGemmError as error:
            self._run.watcher.failed(problem, str(error))
            return known
        if result is None or not result.samples.keys() - {BASELINE_ENTRY}:
            return known
        options, target = self._run.options, evaluator.target
        libraries = frozenset(filter(roster.is_library, options.backends))
        winner = min(result.samples.keys() - {BASELINE_ENTRY}, key=lambda name: median(result.samples[name]))
        config = next(t.config for t in result.trials if t.config.name == winner)
        verified = evaluator.describe(problem, config)
        record = make_record(problem, result, target, options, libraries, verified)
        kept = [trial for trial in result.trials if not trial.try_again]
        self._run.store.add_trials(problem, kept, record)
        for trial in result.trials:
            self._run.watcher.trial(problem, trial)
        return self.measured(problem)

    def _was_tried(self, problem: Problem, config: Config) -> bool:
        return (config.name, "final") in self._run.store.trials(problem)

    def _artifacts(self, problem: Problem, configs: Iterable[Config], evaluator: Evaluator) -> list[Artifact]:
        """What can be launched of some configs at an M; few of them have to be compiled."""
        found: list[Artifact] = []
        jobs: list[tuple[Config, CompileJob]] = []
        for config in dict.fromkeys(configs):
            if not check_config(config, problem, evaluator.target):
                continue
            if not brings_kernels(config):
                found.append(Artifact(config, ""))
                continue
            job = compile_job(problem, config, evaluator.target)
            if not isinstance(job, Support):
                jobs.append((config, job))
        with self._compiling:
            by_digest = {artifact.digest: artifact for artifact in self._run.pool.stream(job for _, job in jobs)}
        found += [replace(by_digest[job.digest], config=config) for config, job in jobs if job.digest in by_digest]
        return [artifact for artifact in found if artifact.status == "ok"]

    def guesses(self, problem: Problem, evaluator: Evaluator) -> list[Config]:
        """The algorithms that the libraries themselves guess best."""
        found: list[Config] = []
        for backend in filter(roster.is_library, self._run.options.backends):
            try:
                found += evaluator.list_algorithms(problem, backend, GUESSES)
            except TritonGemmError as error:
                self._run.watcher.refused(problem, backend, str(error))
        return found


class _SpanTuning:
    """The work on one table.

    Args:
        tables: what all tables share.
        span: the product and its M.
        evaluator: the device that races.
    """

    def __init__(self, tables: TableTuning, span: MSpan, evaluator: Evaluator) -> None:
        self._tables, self._span, self._evaluator = tables, span, evaluator
        self._searched = [m for m in span.searched() if tables.measured(span.at(m)) is not None]
        self._screened = {m: tables.screened(span.at(m)) for m in self._searched}
        self._table = MTable(span.low)

    def table(self) -> MTable:
        """The table; empty where none of its searched M has a result."""
        for m in self._span.ladder():
            found = self._tables.measured(self._span.at(m)) if m in self._screened else self._race(m)
            if found is not None:
                self._table.rows[m] = found
        for gap in self._table.gaps():
            self._settle(*gap)
        self._hold_out()
        return self._table

    def _settle(self, a: int, b: int) -> None:
        """Split the M between two rows until each is served well at the least M of its range."""
        if b <= a + 1 or self._table.agree(a, b) or not self._tables.in_time():
            return
        upper = self._table.rows[b].record
        least = self._race(a + 1, [upper.config])
        regret = least.regret(upper) if least else None
        if regret is None or regret <= MOST_REGRET or b - a <= max(2, b * _FINEST_RANGE):
            return
        middle = self._middle(a, b)
        found = self._race(middle, [upper.config])
        if found is not None:
            self._table.rows[middle] = found
            self._settle(a, middle)
            self._settle(middle, b)

    def _middle(self, a: int, b: int) -> int:
        """An M between two others, at the edge of tiles where there is room."""
        step = next((s for s in (64, 32, 16) if b - a >= 2 * s), 1)
        return min(max(a + 1, round((a + b) / 2 / step) * step), b - 1)

    def _hold_out(self) -> None:
        """Try the rows at M that had no part in choosing them; where one fails, the M gets a row, and others are drawn."""
        for turn in range(MOST_TRIES):
            self._table.held_out = {}
            for m in self._drawn(turn):
                row = self._table.row_of(m)
                found = self._race(m, [row.record.config]) if row else None
                if found is not None:
                    self._table.held_out[m] = found
            failed = [m for m, found in self._table.held_out.items() if self._regret(found) > MOST_REGRET]
            if not failed or turn == MOST_TRIES - 1 or not self._tables.in_time():
                return
            for m in failed:
                self._table.rows[m] = self._table.held_out[m]

    def _regret(self, found: MeasuredM) -> float:
        row = self._table.row_of(found.m)
        return (found.regret(row.record) if row else None) or 0.0

    def _drawn(self, turn: int) -> list[int]:
        """M that nothing has been measured at, spread evenly over the powers of two; the same in a resumed run."""
        low, high = self._span.low, max(self._table.rows, default=self._span.low)
        generator = random.Random(f"{self._span.problem.key} {turn}")
        width = math.log2(high / low) / HELD_OUT if high > low else 0.0
        drawn = [round(low * 2 ** (width * (i + generator.random()))) for i in range(HELD_OUT)]
        return sorted({m for m in drawn if low < m < high and m not in self._table.rows})

    def _race(self, m: int, also: Sequence[Config] = ()) -> MeasuredM | None:
        """Race at an M what is expected to be fast there, and more."""
        problem = self._span.at(m)
        neighbours = [row for row in (self._below(m), self._table.row_of(m)) if row is not None]
        winners = [row.record.config for row in neighbours]
        configs = [*also, *winners, *self._expected(m), *self._tables.guesses(problem, self._evaluator)]
        return self._tables.race(problem, configs, self._evaluator)

    def _below(self, m: int) -> MeasuredM | None:
        lower = [known for known in self._table.rows if known < m]
        return self._table.rows[max(lower)] if lower else None

    def _expected(self, m: int) -> list[Config]:
        """The candidates of the nearest searched M that are expected to be fastest at an M."""
        above = [known for known in self._searched if known >= m]
        below = [known for known in self._searched if known < m]
        expected: defaultdict[Config, list[float]] = defaultdict(list)
        for known in [*above[:1], *below[-1:]]:
            for config, seconds in self._scaled(known, m).items():
                expected[config].append(seconds)
        ranked = sorted(expected, key=lambda config: fmean(expected[config]))
        kernels = [c for c in ranked if brings_kernels(c)]
        algorithms = [c for c in ranked if not brings_kernels(c)]
        return kernels[:EXPECTED] + algorithms[:GUESSES]

    def _scaled(self, known: int, m: int) -> dict[Config, float]:
        """Seconds of candidates at an M: those measured at another, times the ratio that the cost model expects."""
        problem, target = self._span.at(m), self._evaluator.target
        measured = {
            config: seconds
            for config, seconds in self._screened[known].items()
            if check_config(config, problem, target)
        }
        searched = [config for config in measured if roster.is_searched(config.backend)]
        here, there = (_predicted(searched, one, self._evaluator) for one in (problem, self._span.at(known)))
        return {c: s * (here[c] / there[c] if c in here else 1.0) for c, s in measured.items()}


def _predicted(configs: Sequence[Config], problem: Problem, evaluator: Evaluator) -> dict[Config, float]:
    """Seconds that the cost model expects of kernels that it knows."""
    predictions = cost_model.rank(configs, problem, evaluator.target)
    return dict(zip(predictions.configs, predictions.seconds.tolist(), strict=True))
