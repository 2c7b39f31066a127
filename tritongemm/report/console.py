"""Shows a run to the user: a line of progress, tables of results, lines of text.

Names and values come from files, so all that is printed is text as `system.printable` makes it: rich must find no
markup and no emoji in it, and the terminal no escape sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from statistics import geometric_mean, median
from threading import Lock
from time import monotonic

from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from tritongemm.core.artifact import Artifact
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RESTED, RESTED_LIBRARY
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import OUR_FAULT, PREDICTED, Trial
from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.report.alike_lines import summarise
from tritongemm.report.plain_table import align, keep_words
from tritongemm.report.progress import KEPT, Progress
from tritongemm.report.status_line import StatusLine
from tritongemm.system.printable import printable

# Seconds between two lines of progress in a log, where none can change in place.
LINE_SECONDS = 30.0
# Columns of words; the others hold numbers.
_WORDS = ("size", "callers", "config", "winner", "status", "checked", "why", "timer")


class Reporter:
    """Prints progress, tables and lines of text. A terminal has a progress line at its foot until a table is printed.

    With `verbose` also what each pruning rule removed and the outcome of every candidate. `seconds` is the limit of a
    run.
    """

    def __init__(self, verbose: bool = False, console: Console | None = None, seconds: float = 0.0) -> None:
        self.verbose = verbose
        self.console = console or Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)
        self._progress = Progress(seconds)
        self._status = StatusLine(self._compose)
        self._last_line = monotonic()
        self._lock = Lock()
        self.compilers = 0  # of a run that times nothing, for an estimate once all is planned
        self.statuses: Counter[str] = Counter()
        self._refused: set[tuple[str, str]] = set()
        self._faults: dict[str, list[str]] = {}  # configs, each with its size, by what is wrong with their kernels

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        for reason, configs in self._faults.items():
            count = f"{len(configs)} configs" if len(configs) > 1 else "1 config"
            self.say(f"{count} could not be compiled, {OUR_FAULT}{reason}; please report it, with {configs[0]}")

    def say(self, text: str) -> None:
        """Print one line of plain text."""
        width = self._errors.width if self._errors.is_terminal else inf
        self._errors.print(Text(keep_words(printable(text), width)), soft_wrap=True)

    def say_alike(self, lines: Iterable[str]) -> None:
        """Print messages about rows: one of each kind with a count, or all of them where `verbose`."""
        for line in summarise(lines, self.verbose):
            self.say(line)

    def stage(self, name: str, total: int) -> None:
        """Begin a stage, or make it longer by `total` steps."""
        with self._lock:
            self._progress.stage(name, total)
        if not self._errors.is_dumb_terminal:
            self._status.start()

    def step(self, name: str, count: int = 1) -> None:
        """Count steps of a stage; off a terminal, print a line of progress every `LINE_SECONDS` seconds."""
        with self._lock:
            self._progress.step(name, count)
        if name == "plan" and self.compilers and self._progress.is_done(name):
            for line in self._progress.estimate(self.compilers):
                self.say(line)
        self._print_progress()

    def finished(self, record: Record | None) -> None:
        """Count a size that has its result, or none."""
        with self._lock:
            self._progress.finished(record)
        self._print_progress()

    def _print_progress(self) -> None:
        if self._status.is_drawn or monotonic() - self._last_line < LINE_SECONDS:
            return
        self._last_line = monotonic()
        self.say(self._compose())

    def _compose(self, columns: int = 1000) -> str:
        with self._lock:
            return self._progress.line(columns)

    def planned(self, problem: Problem, total: int, kept: int, pruned: Pruned) -> None:
        """Report how many configs of a size are left after pruning, and what each rule removed."""
        with self._lock:
            self._progress.stage(KEPT, kept)
        if not self.verbose:
            return
        self.say(f"{problem.key}: {total} configs, {kept} kept")
        for rule, count in pruned.removed.items():
            if count:
                self.say(f"  {rule:<18} removed {count:>7}, e.g. {pruned.reasons[rule]}")
        for rule in pruned.skipped:
            self.say(f"  {rule:<18} skipped: it would have removed all that were left")

    def offered(self, problem: Problem, backend: str, count: int, why: str) -> None:
        """Report how many candidates a backend has, and why not more."""
        if self.verbose:
            self.say(f"{problem.key}: {backend} brings {count} candidates" + (f": {why}" if why else ""))

    def refused(self, problem: Problem, backend: str, reason: str) -> None:
        """Report that a backend takes no part, at least for this size; the same reason is reported once."""
        if (backend, reason) not in self._refused:
            self._refused.add((backend, reason))
            self.say(f"{problem.key}: {backend} does not race: {reason}")

    def trial(self, problem: Problem, trial: Trial) -> None:
        """Count a candidate's outcome, and print it where `verbose`."""
        with self._lock:
            self.statuses[trial.status] += 1
            self._progress.trial(trial)
            if trial.reason.startswith(OUR_FAULT):
                configs = self._faults.setdefault(trial.reason.removeprefix(OUR_FAULT), [])
                configs.append(f"{trial.config.name} of {problem.key}")
        if not self.verbose:
            return
        time = f"{trial.seconds * 1e6:.2f} us ({trial.timer})" if trial.samples else ""
        error = f"error {trial.error:.2e}" if trial.error is not None else ""
        words = (problem.key, trial.stage, trial.config.name, trial.status, time, error, trial.reason)
        self.say(" ".join(w for w in words if w))

    def failed(self, problem: Problem, reason: str) -> None:
        """Report at once why a size has no result, where `verbose`; when a run ends it lists all of them."""
        if self.verbose:
            self.say(f"{problem.key}: failed: {reason}")

    def compiled(self, builds: Mapping[Problem, Collection[Artifact]]) -> None:
        """Print the outcome of each size's compiles; some configs share a binary, as they differ at run time."""
        columns = ["size", "configs", "binaries", "compiled", "cached", "out_of_resources", "failed"]
        columns += ["seconds", "registers", "spilling", "instructions/matrix instruction", "iterations ahead"]
        self.table("Compiled, neither timed nor verified", columns, [_compiled(p, b) for p, b in builds.items()])
        failed = {b.digest: b for all_ in builds.values() for b in all_ if b.status != "ok"}
        reasons = Counter((b.status, b.reason.splitlines()[0] if b.reason else "") for b in failed.values())
        for (status, reason), count in reasons.most_common(len(reasons) if self.verbose else 5):
            self.say(f"  {count} {status}: {reason}")
        if len(reasons) > 5 and not self.verbose:
            self.say(f"  and {len(reasons) - 5} other reasons; --verbose prints them all")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; columns of numbers are aligned on the right."""
        self._status.stop()
        cells = [[printable(cell) for cell in row] for row in rows]
        width = self.console.width if self.console.is_terminal else inf
        head, *lines = align([printable(column) for column in columns], cells, _WORDS, width)
        heading = [Text(printable(title), style="table.title")] if title else []
        body = Segments([Segment(f"{line}\n") for line in lines])
        self.console.print(*heading, Text(head, style="bold"), body, sep="\n", soft_wrap=True)

    def records(self, records: Sequence[Record], target: Target, compare: bool) -> None:
        """Print the table of results."""
        timers = sorted({r.timer for r in records})
        quantised = compare and any(r.seconds_with_quantization is not None for r in records)
        columns = ["size", "us", *(["library us", "ratio", "winner"] if compare else []), "TFLOPS"]
        columns += ["quantise us", "both us", "of bf16"] if quantised else []
        columns += [
            *([] if compare else ["GB/s"]),
            "roofline",
            "error",
            *(["timer"] if len(timers) > 1 else []),
            "config",
        ]
        rows = []
        plain = {_sizes(r): r.served_seconds for r in records if r.problem.a.scaling is None}
        for record in records:
            cells = _cells(record, target) | _quantised(record, plain)
            rows.append([cells[column] for column in columns])
        if PREDICTED in timers:
            title = f"Predicted, not measured (timer: {PREDICTED})"
        else:
            title = f"Median times (timer: {', '.join(timers)})" if timers else ""
        self.table(title, columns, rows)
        raced = [r for r in records if r.library_seconds is not None]
        if compare and raced:
            won = sum(r.winner != r.library for r in raced)
            ties = sum(r.tie for r in raced)
            mean = geometric_mean(r.speedup or 1.0 for r in raced)
            self.say(
                f"{won} of {len(raced)} sizes won, {ties} tied, {len(raced) - won - ties} lost to {raced[0].library}; "
                f"geometric mean of the ratios {mean:.3f}"
            )
            if hot := [(r.speedup or 1.0, gain) for r in raced if (gain := _rested_gain(r))]:
                sustained, rested = map(geometric_mean, zip(*hot, strict=True))
                self.say(
                    f"{len(hot)} of these sizes raced at sustained power, where it is {sustained:.3f}; "
                    f"the same kernels after rests: {rested:.3f}"
                )
        self.wrong_libraries([r.library_fault for r in records])

    def wrong_libraries(self, faults: Sequence[str]) -> None:
        """Say at how many sizes the library's own result was wrong, and at which; nothing if there is none."""
        found = [fault for fault in faults if fault]
        if found:
            sizes = f"{len(found)} of {len(faults)} size{'s' * (len(faults) > 1)}"
            self.say(f"library wrong at {sizes}, so it did not race there: {'; '.join(found)}")

    def backends(self, records: Sequence[Record], trials: Callable[[Problem], Iterable[Trial]]) -> None:
        """Print what the best of each backend took in the final race, where more than one raced beside the library.

        Who left the race early ran on a hotter or cooler GPU: its time is the fastest one's by their ratio in the
        rounds that both ran. The lead is the winner's over the next backend; the noise half the distance between its
        samples' quartiles.
        """
        raced = [(r, _fastest(t for t in trials(r.problem) if t.stage == "final")) for r in records]
        names = sorted({name for _, best in raced for name in best})
        if len(names) < 2:
            return
        libraries = list(dict.fromkeys(r.library for r in records if r.library))
        columns = [*libraries, *(n for n in names if n not in libraries)]
        rows = []
        for record, best in raced:
            times = dict(best)
            if record.library_seconds is not None:
                times[record.library] = record.library_seconds
            first, *others = sorted(times.values()) or [0.0]
            lead = f"{others[0] / first - 1:.1%}" if others else "-"
            cells = [f"{times[c] * 1e6:.2f}" if c in times else "-" for c in columns]
            rows.append([record.problem.key, *cells, lead, f"{record.spread:.1%}"])
        self.table("Best of each backend, us", ["size", *columns, "lead", "noise"], rows)


def _fastest(trials: Iterable[Trial]) -> dict[str, float]:
    """Return the seconds of the best of each backend among those timed, as if none had left the race early."""
    timed = [t for t in trials if t.status == "ok" and t.samples]
    first = min(timed, key=lambda t: (-len(t.samples), t.seconds), default=None)
    best: dict[str, float] = {}
    for trial in timed:
        seconds = trial.seconds_beside(first or trial)
        best[trial.config.backend] = min(seconds, best.get(trial.config.backend, seconds))
    return best


def _compiled(problem: Problem, builds: Collection[Artifact]) -> list[str]:
    """Return one size's row. Seconds are of all compilers; registers and what loops have: least, median, most."""
    unique = {b.digest: b for b in builds}.values()
    good = [b for b in unique if b.status == "ok"]
    counts = Counter(b.status for b in unique)
    failed = len(unique) - counts["ok"] - counts["out_of_resources"]
    registers = [b.registers for b in good]
    fewest_to_most = f"{min(registers)}-{median(registers):.0f}-{max(registers)}" if registers else "-"
    seconds = sum(b.seconds for b in unique)
    cached = sum(not b.seconds for b in good)
    numbers = (len(builds), len(unique), len(good) - cached, cached, counts["out_of_resources"], failed)
    loops = [b.loop for b in good if b.loop and b.loop.matrix]
    each = _spread([loop.instructions / loop.matrix for loop in loops])
    ahead = _spread([loop.ahead for loop in loops if loop.ahead is not None])
    spilling = str(sum(b.spills > 0 for b in good))
    return [problem.key, *map(str, numbers), f"{seconds:.1f}", fewest_to_most, spilling, each, ahead]


def _spread(numbers: Sequence[float]) -> str:
    """Return the least, median and most of some numbers."""
    return f"{min(numbers):.1f}-{median(numbers):.1f}-{max(numbers):.1f}" if numbers else "-"


def _cells(record: Record, target: Target) -> dict[str, str]:
    """Return the cells of a result's row, by column."""
    problem, library = record.problem, record.library_seconds
    least = target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)
    return {
        "size": problem.key,
        "us": f"{record.seconds * 1e6:.2f}",
        "library us": "-" if library is None else f"{library * 1e6:.2f}",
        "ratio": "-" if record.speedup is None else f"{record.speedup:.3f}",
        "winner": record.winner + (" (tie)" if record.tie and library is not None else ""),
        "TFLOPS": f"{record.tflops:.1f}",
        "GB/s": f"{record.gbps:.0f}",
        "roofline": f"{least / record.seconds:.2f}",
        "error": "-" if record.error is None else f"{record.error:.1e}",
        "timer": record.timer,
        "config": record.config.short_name,
    }


def _rested_gain(record: Record) -> float | None:
    """Return how much faster than the library a result of sustained power is after rests; None where it isn't known."""
    ours, library = record.notes.get(RESTED), record.notes.get(RESTED_LIBRARY)
    if not (isinstance(ours, float) and isinstance(library, float)):
        return None
    return library / ours if ours > 0 and library > 0 else None


def _quantised(record: Record, plain: Mapping[tuple[object, ...], float]) -> dict[str, str]:
    """Return a product's time with that of quantising A, and bf16's over it, where the same table has bf16's."""
    both, alone = record.seconds_with_quantization, record.quantize_seconds
    if both is None or alone is None:
        return dict.fromkeys(("quantise us", "both us", "of bf16"), "-")
    bf16 = plain.get((*_sizes(record)[:-1], "bf16"))
    ratio = "-" if bf16 is None else f"{bf16 / both:.3f}"
    return {"quantise us": f"{alone * 1e6:.2f}", "both us": f"{both * 1e6:.2f}", "of bf16": ratio}


def _sizes(record: Record) -> tuple[object, ...]:
    """Return what products have in common that compute the same on other types, then the type of A."""
    p = record.problem
    return p.m, p.n, p.k, p.batch, p.groups, p.bias, p.a.dtype
