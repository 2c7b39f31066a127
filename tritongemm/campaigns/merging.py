"""Merges results of two campaigns: where they disagree, both kernels race again, or the recorded times decide."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tritongemm.campaigns.campaign import MERGED, MeasuringTools, OpenEvaluator, OpenTools
from tritongemm.campaigns.served_kernel import served_config
from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats import read_text, results_format
from tritongemm.hip_ext.machine import toolchain
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Evaluator
from tritongemm.results import journal
from tritongemm.results.run_files import RunFiles
from tritongemm.system import files
from tritongemm.system.printable import printable
from tritongemm.tune.final_race import race_again
from tritongemm.tune.free_devices import work_when_free
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.revalidate import compile_rows

RACES = "merging.journal"  # in the campaign's folder while its results are merged
_RACED = "raced"  # a note of a record in it: the kernels that raced
_KernelKey: TypeAlias = tuple[Problem, int, tuple[str, ...]]


@dataclass(frozen=True)
class Conflict:
    """Two results of one problem on one kind of device, that serve different kernels."""

    mine: Record
    theirs: Record

    @property
    def both(self) -> tuple[Record, Record]:
        """Both results, the first file's first."""
        return self.mine, self.theirs

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the two kernels; a library's own choice has the library's."""
        return tuple(r.winner if (config := served_config(r)) is None else config.name for r in self.both)


class RaceLog:
    """Results of conflicts that raced again; a log of another toolchain, device or protocol is set aside."""

    def __init__(self, path: Path, tools: MeasuringTools) -> None:
        self._journal, lines = journal.resume(path, _describe_conflict(tools))
        self._raced = dict(_keyed(line.value) for line in lines if line.kind == "record")

    def find(self, conflict: Conflict) -> Record | None:
        """Return the result of a conflict's race; None where it has not raced."""
        return self._raced.get((conflict.mine.problem, conflict.mine.compute_units, conflict.kernels))

    def add(self, conflict: Conflict, result: Record) -> None:
        """Store the result of a race, on disk when this returns."""
        marked = replace(result, notes={**result.notes, _RACED: list(conflict.kernels)})
        self._journal.append([{"record": marked.to_json()}])

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def _describe_conflict(tools: MeasuringTools) -> dict[str, Any]:
    """Return the header of the log, which must agree for a merge to resume."""
    target = tools.machine.target
    header = {"target": target.name, "compute_units": target.compute_units, "toolchain": toolchain(tools.machine)}
    return header | {"protocol": asdict(tools.protocol), "schema": SCHEMA}


def _keyed(marked: Record) -> tuple[_KernelKey, Record]:
    """Return a result of the log without its mark, and the key of its conflict."""
    notes = dict(marked.notes)
    kernels = notes.pop(_RACED, ())
    names = tuple(map(str, kernels)) if isinstance(kernels, (list, tuple)) else ()
    return (marked.problem, marked.compute_units, names), replace(marked, notes=notes)


_Key: TypeAlias = tuple[Problem, str, int]
_ADVICE = "make room and run the same command again"


# Answers each conflict with a new result, or the reason why there is none.
Remeasure: TypeAlias = Callable[[Sequence[Conflict]], Sequence[Record | Support]]


@dataclass(frozen=True)
class MergedResults:
    """The outcome of a merge."""

    records: tuple[Record, ...]  # those of the file
    notes: tuple[str, ...]  # a line for each conflict: what was kept, and why


def merge_campaign(
    folder: Path, theirs: Path, open_tools: OpenTools | None, say: Callable[[str], None]
) -> MergedResults:
    """Merge another campaign's results into those of a folder, measured again where there is a GPU.

    Each race is in `RACES` when it is over, from where a killed merge goes on; who has merged everything deletes it.
    """
    mine = folder / MERGED
    with _remeasuring(folder / RACES, open_tools, say) as remeasure:
        merged = merge_results(mine, theirs, mine, remeasure)
    for note in merged.notes:
        say(note)
    say(f"merged: {len(merged.records)} results in {mine}; {len(merged.notes)} conflicts")
    return merged


@contextmanager
def _remeasuring(races: Path, open_tools: OpenTools | None, say: Callable[[str], None]) -> Iterator[Remeasure | None]:
    if open_tools is None:
        yield None
        return
    with open_tools("the merge") as tools, closing(RaceLog(races, tools)) as log:
        yield partial(race_conflicts, tools, say, log=log)


def merge_results(mine: Path, theirs: Path, out: Path, remeasure: Remeasure | None = None) -> MergedResults:
    """Merge two files of results into one of them or a third, with the better row of each problem and kind of device.

    The first file's order is kept; what is new in the second follows. `remeasure` races both kernels of each conflict;
    None to go by the recorded times.
    """
    run_files = RunFiles(out)
    run_files.hold()
    try:
        first, second = (read_results(path, read_text(path)) for path in (mine, theirs))
        disputed = {
            key: Conflict(first[key], r) for key, r in second.items() if key in first and _differ(first[key], r)
        }
        found = list(remeasure([*disputed.values()]) if remeasure and disputed else [])
        answers = dict(zip(disputed, found, strict=True)) if found else {}
        merged, notes = {**second, **first}, []
        for key, conflict in disputed.items():
            answer = answers.get(key, Support("nothing here can measure them"))
            # As recorded: measured before predicted, then the faster; else the first file's.
            recorded = min(conflict.both, key=lambda r: (r.predicted, r.served_seconds))
            merged[key] = recorded if isinstance(answer, Support) else answer
            notes.append(_describe(conflict, answer, merged[key], mine, theirs))
        records = tuple(merged[key] for key in dict.fromkeys([*first, *second]))
        files.atomic_write(run_files.results, results_format().write(records), _ADVICE)
    finally:
        run_files.release()
    return MergedResults(records, tuple(notes))


def read_results(path: Path, text: str) -> dict[_Key, Record]:
    """Return the results of a file, by problem and device."""
    results = results_format().read_results(path, text, Defaults()).require_undamaged()
    records = [row.record for row in results.rows if row.record is not None]
    if not records:
        raise InputError(f"{path} has no results, only sizes")
    return {(r.problem, r.target, r.compute_units): r for r in records}


def _differ(mine: Record, theirs: Record) -> bool:
    """Return whether two results serve different kernels, or one of them was never measured."""
    return served_config(mine) != served_config(theirs) or mine.predicted != theirs.predicted


def _describe(conflict: Conflict, answer: Record | Support, kept: Record, mine: Path, theirs: Path) -> str:
    """Return a line with both times of a conflict, which result is kept, and why."""
    times = f"{_timed(conflict.mine)} in {mine}, {_timed(conflict.theirs)} in {theirs}"
    how = f"by the recorded times ({answer})" if isinstance(answer, Support) else f"raced again: {_timed(kept)}"
    return printable(f"{kept.problem.key}: {times}; {_name(kept)} is kept, {how}")


def _timed(record: Record) -> str:
    """Return the kernel that a result serves, and its time in microseconds."""
    return f"{_name(record)} {record.served_seconds * 1e6:.4g} us"


def _name(record: Record) -> str:
    config = served_config(record)
    return record.winner if config is None else config.short_name


def race_conflicts(
    tools: MeasuringTools, say: Callable[[str], None], conflicts: Sequence[Conflict], log: RaceLog
) -> list[Record | Support]:
    """Race the kernels of each conflict and the baseline, on all devices at once."""
    target = tools.machine.target
    elsewhere = Support(f"this GPU is a {target.name} of {target.compute_units} compute units")
    answers: list[Record | Support] = [elsewhere] * len(conflicts)
    for number, conflict in enumerate(conflicts):
        answers[number] = log.find(conflict) or elsewhere
    here = [number for number, one in enumerate(conflicts) if _is_of(one, target) and answers[number] is elsewhere]
    rows = [FormatRow(r.problem, r.config, target=r.target) for c in here for r in conflicts[c].both]
    compiled = [artifact for _, artifact in compile_rows(rows, target, tools.pool)]
    artifacts = dict(zip(here, zip(compiled[::2], compiled[1::2], strict=True), strict=True))
    options = TuningOptions(Path(), library=registry.baseline().name, toolchain=toolchain(tools.machine))

    def race(evaluator: Evaluator, number: int) -> Record | Support:
        return _raced(evaluator, conflicts[number], artifacts[number], options)

    with _started(tools.openers[: len(here)]) as evaluators:
        for number, answer in work_when_free(evaluators, here, race, say) if here else ():
            answers[number] = answer
            if isinstance(answer, Record):
                log.add(conflicts[number], answer)
    return answers


def _is_of(conflict: Conflict, target: Target) -> bool:
    return conflict.mine.target == target.name and conflict.mine.compute_units in (0, target.compute_units)


@contextmanager
def _started(openers: Sequence[OpenEvaluator]) -> Iterator[list[Evaluator]]:
    """Yield devices that start at once, and close them at the end."""
    with ExitStack() as stack:
        evaluators = [stack.enter_context(closing(open_one())) for open_one in openers]
        for evaluator in evaluators:
            evaluator.start()
        yield evaluators


def _raced(
    evaluator: Evaluator, conflict: Conflict, artifacts: Sequence[Artifact], options: TuningOptions
) -> Record | Support:
    """Return the result of a race of a conflict's kernels, or why there is none."""
    made = race_again(evaluator, conflict.mine.problem, artifacts, options)
    if isinstance(made, Support):
        return made
    # What a race does not measure, such as the range of M, is taken from the result of the same kernel.
    source = conflict.mine if conflict.mine.config == made.config else conflict.theirs
    return replace(
        made,
        compute_units=source.compute_units,
        m_from=source.m_from,
        held_out=source.held_out,
        quantize_seconds=source.quantize_seconds,
        notes=source.notes,
    )
