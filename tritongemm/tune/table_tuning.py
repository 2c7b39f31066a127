"""The stage that makes tables over M from the tuned sizes of one product.

Rows are measured from the largest M down. At an M between the searched ones, the candidates expected to be fastest race
there: kernels of the nearest searched M and such whose tiles fit M between them, algorithms of the libraries, and the
winner of the row above.
A row serves the M below it down to the next row, which begins where tiles of another height fit better. At the least M
of its range, where the library may take another kernel, its fastest candidates race again; if it is too slow there, the
range is split. So it is where it is too slow at held-out M, which had no part in this.
"""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from math import inf
from statistics import median

from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.codegen import template_facts
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.plugins.contracts import Evaluator
from tritongemm.plugins.validity import check_config
from tritongemm.tune import roster
from tritongemm.tune.expectation import Expectation
from tritongemm.tune.m_table import MOST_REGRET, MeasuredM, MTable, library_serves
from tritongemm.tune.quantization import with_quantization
from tritongemm.tune.run import TuningRun
from tritongemm.tune.search_processes import Planner, RankJob
from tritongemm.tune.task import make_record
from tritongemm.workloads.m_spans import FINE_UP_TO, MSpan

KERNELS = (5, 6)  # kernels that race at an M as the fastest expected there; the second number where M is small
ALGORITHMS = (5, 2)  # the same of the libraries' algorithms
MOST_OF_A_TILE = (3, 2)  # of those kernels, of those algorithms that have the same tile
GUESSES = 48  # algorithms that a library is asked for, its own best guesses
FIRST_GUESSES = 2  # the first of them race anyway: PyTorch takes one of these
GUESSED_BELOW = (1 / 24, 1 / 12)  # and the first ones this far below an M, where its row serves
HELD_OUT = 8  # M of a table at which rows are tried without having been chosen there
TABLES_A_DEVICE = 3  # tables that are made at a time, so that a device races for one while others are computed
MOST_TRIES = 2  # times that M are held out, where rows failed at the first
AT_START = 3  # candidates of a row that race at the least M of its range
_STEP = 64  # of the library's time: a range that has one is split there
_TILE = 64  # side of the tiles that fill the device where K need not be split
_SCREENED = 24  # kernels of a searched M, the fastest first, that may race at its neighbours
_TILE_STEP = 8  # step of the heights of a library's tiles, in rows
_ALONE_STEPS = 16  # M to twice it for which kernels are offered where no library has a tile for each 8 rows
_FITTING = 4  # kernels that are offered for an M between the searched ones
_SHORTEST_STEP, _LONGEST_STEP = 1 / 40, 1 / 11  # from one row of a table to the next, relative to its M
_LONGEST_FIT = 1 / 10  # the same where the next row ends where lower tiles of a library fit


@dataclass(frozen=True)
class RacingDevice:
    """A device that one table or layer at a time may use."""

    evaluator: Evaluator
    lock: threading.Lock


class TableTuning:
    """Makes tables over M from the results of a run."""

    def __init__(self, run: TuningRun) -> None:
        self._run = run
        self._compiling = threading.Lock()
        self._planner = Planner(0)

    def tune(self, spans: Sequence[MSpan]) -> dict[MSpan, MTable]:
        """Make the tables of spans whose searched M are tuned; their records go to the store."""
        self._run.watcher.stage("table", len(spans))
        devices = self.devices()

        def work(number: int) -> MTable:
            table = _SpanTuning(self, spans[number], devices[number % len(devices)]).table()
            self._run.watcher.step("table")
            return table

        self._planner = Planner.for_problems(sum(len(span.between()) for span in spans), self._run.pool.jobs)
        with closing(self._planner), ThreadPoolExecutor(TABLES_A_DEVICE * len(devices)) as pool:
            tables = dict(zip(spans, pool.map(work, range(len(spans))), strict=True))
        for table in tables.values():
            for record in table.records():
                if self._run.store.record(record.problem) != record:
                    self._run.store.add_record(record)
        return tables

    def devices(self) -> list[RacingDevice]:
        """Return the devices that run the races, each with a lock of its own."""
        return [RacingDevice(evaluator, threading.Lock()) for evaluator in self._run.evaluators]

    def in_time(self) -> bool:
        """Say whether time is left in the run's budget."""
        return time.monotonic() <= self._run.ends

    def measured(self, problem: Problem) -> MeasuredM | None:
        """Return the stored result of a race at one M; None if there was none."""
        record = self._run.store.record(problem)
        if record is None:
            return None
        finals = [t for (_, stage), t in self._run.store.trials(problem).items() if stage == "final" and t.samples]
        return MeasuredM(record, {t.config: t.seconds for t in finals} | {record.config: record.seconds})

    def screened(self, problem: Problem) -> dict[Config, float]:
        """Return the seconds of the fastest candidates of a searched M, from their last race or screen."""
        trials = sorted(self._run.store.trials(problem).values(), key=lambda t: t.stage)  # a final comes first
        found: dict[Config, float] = {}
        for trial in trials:
            if trial.status == "ok" and trial.samples:
                found.setdefault(trial.config, trial.seconds)
        kernels = sorted((c for c in found if roster.is_searched(c.backend)), key=found.__getitem__)[:_SCREENED]
        return {c: s for c, s in found.items() if c in kernels or not roster.is_searched(c.backend)}

    def race(self, problem: Problem, configs: Iterable[Config], device: RacingDevice) -> MeasuredM | None:
        """Race configs with the baseline at one M; None if none is correct there. Stored results are reused."""
        options, target = self._run.options, device.evaluator.target
        wanted = [c for c in dict.fromkeys(configs) if options.may_race(c, problem, target)]
        known = self.measured(problem)
        if known is not None and self._run.store.trials(problem).keys() >= {(c.name, "final") for c in wanted}:
            return known
        evaluator = device.evaluator
        artifacts = self._artifacts(problem, [*wanted, *(known.seconds if known else ())], evaluator)
        if not artifacts:
            return known
        try:
            with device.lock:
                result = evaluator.race(problem, artifacts, options.library, brief=True)
                result = with_quantization(result, problem, evaluator)
        except TritonGemmError as error:
            self._run.watcher.say(f"{problem.key} is not measured: {error}")
            return known
        result = options.compare(problem, result)
        if not result.samples.keys() - {BASELINE_ENTRY}:
            return known
        libraries = frozenset(filter(roster.is_library, options.backends))
        winner = min(result.samples.keys() - {BASELINE_ENTRY}, key=lambda name: median(result.samples[name]))
        config = next(t.config for t in result.trials if t.config.name == winner)
        verified = evaluator.describe(problem, config)
        record = _preferring_kernels(make_record(problem, result, target, options, libraries, verified, artifacts))
        kept = [trial for trial in result.trials if not trial.try_again]
        answered = {trial.config for trial in result.trials}
        kept += [Trial(c, "pruned", "it did not race at this M", stage="final") for c in wanted if c not in answered]
        self._run.store.add_trials(problem, kept, record)
        for trial in result.trials:
            self._run.watcher.trial(problem, trial)
        return self.measured(problem)

    def _artifacts(self, problem: Problem, configs: Iterable[Config], evaluator: Evaluator) -> list[Artifact]:
        """Return the artifacts of configs that can be launched at an M; few of them have to be compiled."""
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

    def fitting(self, span: MSpan, device: RacingDevice) -> list[Config]:
        """Return kernels whose tiles are expected to be the fastest at M between the searched ones, all compiled."""
        options, target = self._run.options, device.evaluator.target
        backend = next(filter(roster.is_searched, options.backends), "")
        roles = (n for n in template_facts.names() if "warp_roles" in template_facts.search_facts(n).rules)
        templates = tuple(name for name in roles if not options.limits.templates or name in options.limits.templates)
        if not (backend and templates and self.in_time()):
            return []
        limits = replace(options.limits_of(span.problem), templates=templates)
        unsplit = limits if limits.order and limits.order.runs > 1 else replace(limits, most_splits=1)
        order = limits.order if options.invariance and options.invariance.with_libraries else None
        has_library = options.invariance is None or (order is not None and order.runs == 1)
        jobs = []
        for problem in map(span.at, span.between() if has_library else span.between(_ALONE_STEPS)):
            fills = cdiv(problem.m, _TILE) * cdiv(problem.n, _TILE) * problem.batch >= target.compute_units
            jobs.append(RankJob(problem, target, backend, unsplit if fills else limits))
        ranked = takewhile(lambda _: self.in_time(), self._planner.best(jobs))
        found = dict.fromkeys(config for best in ranked for config in best[:_FITTING])
        return [artifact.config for artifact in self._artifacts(span.at(span.high), found, device.evaluator)]

    def guesses(self, problem: Problem, device: RacingDevice, limit: int = GUESSES) -> list[Config]:
        """Return the first few algorithms of each library's own heuristic."""
        found: list[Config] = []
        for backend in filter(roster.is_library, self._run.options.backends):
            try:
                with device.lock:
                    listed = device.evaluator.list_algorithms(problem, backend, limit)
            except TritonGemmError as error:
                self._run.watcher.refused(problem, backend, str(error))
                continue
            found += [c for c in listed if self._run.options.may_race(c, problem, device.evaluator.target)]
        return found


class _SpanTuning:
    """The work on one table."""

    def __init__(self, tables: TableTuning, span: MSpan, device: RacingDevice) -> None:
        self._tables, self._span, self._device = tables, span, device
        self._expectation = Expectation(span, device.evaluator.target)
        self._table = MTable(span.low)
        self._searched: list[int] = []
        for m in span.searched():
            found = tables.measured(span.at(m))
            if found is not None:
                self._searched.append(m)
                self._expectation.note(m, tables.screened(span.at(m)))
                self._table.rows[m] = found
        if self._searched:
            self._expectation.offer(tables.fitting(span, device))

    def table(self) -> MTable:
        """Return the table; empty where none of its searched M has a result."""
        if not self._searched:
            return self._table
        fixed = {*self._span.ladder(), *self._searched}
        m = max(self._searched)
        while m > self._span.low and self._tables.in_time():  # operands of fewer rows are those of more
            m = max(self._next_below(m), max((one for one in fixed if one < m), default=self._span.low))
            if m not in self._table.rows:
                self._add_row(m)
        for m in sorted(m for m in self._table.rows if m > FINE_UP_TO):
            self._look_at_start(m)
        self._hold_out()
        return self._table

    def _look_at_start(self, m: int, is_split: bool = False) -> None:
        """Race a row's fastest candidates at the least M of its range, and split the range if the row is slow there.

        What the row below has races too: its last tile may have room for more rows.
        """
        row = self._table.rows[m]
        below = max((one for one in self._table.rows if one < m), default=self._span.low - 1)
        start = below + 1
        if start == m or not self._tables.in_time():
            return
        fastest = sorted(row.seconds, key=row.seconds.__getitem__)[:AT_START]
        lower = [self._table.rows[below].record.config] if below in self._table.rows else []
        found = self._tables.race(self._span.at(start), [row.record.config, *lower, *fastest], self._device)
        if found is None:
            return
        self._table.starts[start] = found
        regret, step = found.regret(row.record) or 0.0, (m - 1) // _STEP * _STEP
        middle = step if start <= step else (start + m) // 2
        if regret == inf or (regret > MOST_REGRET and middle == start):  # The library is wrong there.
            self._table.rows[start] = found
        elif regret > MOST_REGRET and not is_split:
            self._add_row(middle)
            for one in sorted({middle, m} & self._table.rows.keys()):
                self._look_at_start(one, is_split=True)

    def _next_below(self, m: int) -> int:
        """Return the M at which a row stops being the best, as its tiles would fit another height."""
        row = self._table.row_of(m)
        if row is None or m <= FINE_UP_TO or not row.record.config.block_m:
            return self._span.low
        height, is_library = row.record.config.block_m, roster.is_library(row.record.config.backend)
        step = cdiv(m, height) * _TILE_STEP if is_library else height
        least, most = round(m * (1 - _LONGEST_STEP)), math.floor(m * (1 - _SHORTEST_STEP))
        edge = most // step * step  # M that tiles of another height, or one tile fewer, fit exactly
        if is_library and edge >= m * (1 - _LONGEST_FIT):
            return edge
        while edge < least and step % (2 * _TILE_STEP) == 0:  # a row just above an edge would hide what is best below
            step //= 2
            edge = most // step * step
        return max(edge, least)

    def _add_row(self, m: int) -> None:
        found = self._race(m)
        if found is not None:
            self._table.rows[m] = found

    def _hold_out(self) -> None:
        """Try the rows at M that had no part in choosing them; a failure adds a row, and other M are drawn."""
        for turn in range(MOST_TRIES):
            self._table.held_out = {}
            for m in self._drawn(turn):
                row = self._table.row_of(m)
                found = self._race(m, [row.record.config]) if row else None
                if found is not None:
                    self._table.held_out[m] = found
            failed = [m for m, found in self._table.held_out.items() if self._regret(found) > MOST_REGRET]
            last = not failed or turn == MOST_TRIES - 1 or not self._tables.in_time()
            for m in failed:
                if not last or self._regret(self._table.held_out[m]) == inf:  # The library is wrong there.
                    self._table.rows[m] = self._table.held_out[m]
            if last:
                return

    def _regret(self, found: MeasuredM) -> float:
        row = self._table.row_of(found.m)
        return (found.regret(row.record) if row else None) or 0.0

    def _drawn(self, turn: int) -> list[int]:
        """Return M without measurements, spread evenly over the powers of two; the same in a resumed run."""
        low, high = self._span.low, max(self._table.rows, default=self._span.low)
        generator = random.Random(f"{self._span.problem.key} {turn}")
        width = math.log2(high / low) / HELD_OUT if high > low else 0.0
        drawn = [round(low * 2 ** (width * (i + generator.random()))) for i in range(HELD_OUT)]
        known = {*self._table.rows, *self._table.starts}
        free = (next((one for one in range(m, high) if one not in known), low) for m in drawn)
        return sorted({m for m in free if m > low})

    def _race(self, m: int, also: Sequence[Config] = ()) -> MeasuredM | None:
        """Race at an M the kernels that are expected to be fast there, and more."""
        problem = self._span.at(m)
        above = [known for known in self._searched if known >= m]
        below = [known for known in self._searched if known < m]
        kernels = self._expectation.kernels(m, [*above[:1], *below[-1:]])
        guesses = self._tables.guesses(problem, self._device)
        algorithms = self._expectation.algorithms(m, guesses)
        neighbour = self._table.row_of(m)
        winners = [neighbour.record.config] if neighbour else []
        few = m <= FINE_UP_TO
        expected = self._fitting(_of_several_tiles(kernels, MOST_OF_A_TILE[0]), problem, KERNELS[few])
        expected += self._fitting(_of_several_tiles(algorithms, MOST_OF_A_TILE[1]), problem, ALGORITHMS[few])
        guessed = guesses[:FIRST_GUESSES] + ([] if few else self._guessed_below(m))
        found = self._tables.race(problem, [*also, *winners, *expected, *guessed], self._device)
        if found is not None:
            self._expectation.note(m, found.seconds)
        return found

    def _guessed_below(self, m: int) -> list[Config]:
        """Return the libraries' first guesses at some M that the row of an M may serve."""
        lower = {max(self._span.low, round(m * (1 - part))) for part in GUESSED_BELOW}
        return [c for one in sorted(lower) for c in self._tables.guesses(self._span.at(one), self._device, 1)]

    def _fitting(self, configs: Iterable[Config], problem: Problem, count: int) -> list[Config]:
        """Return the first `count` that can compute a problem."""
        target = self._device.evaluator.target
        return list(islice((config for config in configs if check_config(config, problem, target)), count))


def _of_several_tiles(configs: Iterable[Config], most: int) -> Iterator[Config]:
    """Yield configs in their order, but at most `most` of a tile, as similar ones are expected alike."""
    seen: Counter[tuple[object, ...]] = Counter()
    for config in configs:
        tile = (config.template, config.block_m, config.block_n, config.split_k)
        seen[tile] += 1
        if seen[tile] <= most:
            yield config


def _preferring_kernels(record: Record) -> Record:
    """Return a result whose tie goes to its candidate: the kernel that the library chooses changes from M to M."""
    return replace(record, winner=record.config.backend) if record.tie and library_serves(record) else record
