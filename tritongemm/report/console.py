"""What the user sees: progress bars per stage, tables of results, log lines. Quiet where there is no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tritongemm.core.artifact import Artifact
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.search_results import Pruned
from tritongemm.core.target import Target
from tritongemm.core.trial import PREDICTED, Trial


class Reporter:
    """Progress and tables on one console.

    Args:
        verbose: also say what each prune rule removed and what became of every candidate.
    """

    def __init__(self, verbose: bool = False, console: Console | None = None) -> None:
        self.verbose = verbose
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = 240  # a pipe has no width to respect
        self._errors = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._errors,
            disable=not self._errors.is_terminal,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = Lock()
        self.statuses: Counter[str] = Counter()
        self._refused: set[tuple[str, str]] = set()

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line of plain text."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def stage(self, name: str, total: int) -> None:
        with self._lock:
            if name in self._tasks:
                task = self._progress.tasks[self._tasks[name]]
                self._progress.update(self._tasks[name], total=(task.total or 0) + total)
            else:
                self._tasks[name] = self._progress.add_task(name, total=total)

    def step(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._progress.advance(self._tasks[name], count)

    def planned(self, problem: Problem, total: int, pruned: Pruned) -> None:
        if not self.verbose:
            return
        self.say(f"{problem.key}: {total} configs, {len(pruned.kept)} kept")
        for rule, count in pruned.removed.items():
            if count:
                self.say(f"  {rule:<18} removed {count:>7}, e.g. {pruned.reasons[rule]}")
        for rule in pruned.skipped:
            self.say(f"  {rule:<18} skipped: it would have removed all that were left")

    def offered(self, problem: Problem, backend: str, count: int, why: str) -> None:
        """A backend brought so many candidates; `why` not more."""
        if self.verbose:
            self.say(f"{problem.key}: {backend} brings {count} candidates" + (f": {why}" if why else ""))

    def refused(self, problem: Problem, backend: str, reason: str) -> None:
        """A backend takes no part, for this problem at least; the same reason is said once."""
        if (backend, reason) not in self._refused:
            self._refused.add((backend, reason))
            self.say(f"{problem.key}: {backend} does not race: {reason}")

    def trial(self, problem: Problem, trial: Trial) -> None:
        with self._lock:
            self.statuses[trial.status] += 1
        if not self.verbose:
            return
        time = f"{trial.seconds * 1e6:.2f} us ({trial.timer})" if trial.samples else ""
        error = f"error {trial.error:.2e}" if trial.error is not None else ""
        words = (problem.key, trial.stage, trial.config.name, trial.status, time, error, trial.reason)
        self.say(" ".join(w for w in words if w))

    def failed(self, problem: Problem, reason: str) -> None:
        self.say(f"{problem.key}: failed: {reason}")

    def compiled(self, builds: Mapping[Problem, Collection[Artifact]]) -> None:
        """What became of each size's configs in the compiler; configs that differ at run time alone share a binary."""
        columns = [
            "size",
            "configs",
            "binaries",
            "compiled",
            "cached",
            "out_of_resources",
            "failed",
            "s",
            "registers",
            "spill",
        ]
        self.table("Compiled, neither timed nor verified", columns, [_compiled(p, b) for p, b in builds.items()])
        failed = {b.digest: b for all_ in builds.values() for b in all_ if b.status != "ok"}
        reasons = Counter((b.status, b.reason.splitlines()[0] if b.reason else "") for b in failed.values())
        for (status, reason), count in reasons.most_common(len(reasons) if self.verbose else 5):
            self.say(f"  {count} {status}: {reason}")
        if len(reasons) > 5 and not self.verbose:
            self.say(f"  and {len(reasons) - 5} other reasons; --verbose prints them all")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is text, the others are numbers."""
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            numeric = index and column not in ("config", "winner", "status", "why", "timer")
            table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=bool(numeric))
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def records(self, records: Sequence[Record], target: Target, compare: bool) -> None:
        """The table of results, with the library's times beside ours where asked."""
        rows = [_row(r, target, compare) for r in records]
        columns = ["size", "us", "TFLOPS", "GB/s", "roofline"]
        if compare:
            columns += ["library us", "ratio", "winner"]
        title = f"Predicted, not measured (timer: {PREDICTED})" if any(r.timer == PREDICTED for r in records) else ""
        self.table(title, [*columns, "error", "timer", "config"], rows)
        raced = [r for r in records if r.library_seconds is not None]
        if compare and raced:
            won = sum(r.winner != r.library for r in raced)
            ties = sum(r.tie for r in raced)
            mean = 1.0
            for r in raced:
                mean *= (r.speedup or 1.0) ** (1 / len(raced))
            self.say(
                f"{won} of {len(raced)} sizes won, {ties} tied, {len(raced) - won - ties} lost to {raced[0].library}; "
                f"geometric mean of the ratios {mean:.3f}"
            )

    def backends(self, records: Sequence[Record], trials: Callable[[Problem], Iterable[Trial]]) -> None:
        """What the best of each backend took in the final race, where more than one raced beside the library.

        The lead is the winner's over the next backend, the noise half the distance between the winner's quartiles.

        Args:
            records: results.
            trials: what is known of a problem's candidates.
        """
        raced = [(r, _fastest(t for t in trials(r.problem) if t.stage == "final")) for r in records]
        names = sorted({name for _, best in raced for name in best})
        if len(names) < 2:
            return
        libraries = list(dict.fromkeys(r.library for r in records if r.library))
        columns = [*libraries, *(n for n in names if n not in libraries)]
        rows = []
        for record, best in raced:
            times = {name: t.seconds for name, t in best.items()}
            if record.library_seconds is not None:
                times[record.library] = record.library_seconds
            first, *others = sorted(times.values()) or [0.0]
            lead = f"{others[0] / first - 1:.1%}" if others else "-"
            cells = [f"{times[c] * 1e6:.2f}" if c in times else "-" for c in columns]
            rows.append([record.problem.key, *cells, lead, f"{record.spread:.1%}"])
        self.table("Best of each backend, us", ["size", *columns, "lead", "noise"], rows)


def _fastest(trials: Iterable[Trial]) -> dict[str, Trial]:
    """The best of each backend among those that were timed."""
    best: dict[str, Trial] = {}
    for trial in sorted((t for t in trials if t.status == "ok" and t.samples), key=lambda t: t.seconds):
        best.setdefault(trial.config.backend, trial)
    return best


def _compiled(problem: Problem, builds: Collection[Artifact]) -> list[str]:
    """One size's row; seconds are of all compilers together, registers of a thread: fewest, median, most."""
    unique = {b.digest: b for b in builds}.values()
    good = [b for b in unique if b.status == "ok"]
    counts = Counter(b.status for b in unique)
    failed = len(unique) - counts["ok"] - counts["out_of_resources"]
    registers = [b.registers for b in good]
    spread = f"{min(registers)}-{median(registers):.0f}-{max(registers)}" if registers else "-"
    seconds = sum(b.seconds for b in unique)
    cached = sum(not b.seconds for b in good)
    numbers = (len(builds), len(unique), len(good) - cached, cached, counts["out_of_resources"], failed)
    return [problem.key, *map(str, numbers), f"{seconds:.1f}", spread, str(sum(b.spills > 0 for b in good))]


def _row(record: Record, target: Target, compare: bool) -> list[str]:
    problem = record.problem
    roof = target.roofline_seconds(problem.flops, problem.bytes, problem.a) / record.seconds
    row = [problem.key, f"{record.seconds * 1e6:.2f}", f"{record.tflops:.1f}", f"{record.gbps:.0f}", f"{roof:.2f}"]
    if compare:
        if record.library_seconds is None:
            row += ["-", "-", record.winner]
        else:
            winner = record.winner + (" (tie)" if record.tie else "")
            row += [f"{record.library_seconds * 1e6:.2f}", f"{record.speedup:.3f}", winner]
    error = "-" if record.error is None else f"{record.error:.1e}"
    return [*row, error, record.timer, record.config.name]
