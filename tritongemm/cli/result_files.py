"""Reads the results, journals, libraries and campaigns that a command names, and the calls of a workload."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tritongemm.campaigns.campaign import MERGED, TUNED
from tritongemm.campaigns.driver import NAME as CAMPAIGN
from tritongemm.campaigns.stages.benchmark import read_counts
from tritongemm.core.errors import InputError, TargetError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.export.library import storage
from tritongemm.formats import Defaults
from tritongemm.hip_ext import machine
from tritongemm.report.page.report_data import MOST_RECORDS, MeasuredDevice, ReportData, device_of, name_product
from tritongemm.results import history, journal
from tritongemm.results.history import History
from tritongemm.results.run_files import RunFiles
from tritongemm.search_spaces import loader
from tritongemm.serving import shipped_tables
from tritongemm.serving.loaded_tables import read_table
from tritongemm.serving.source_row import same_memory
from tritongemm.system import files
from tritongemm.workloads import sizes

_MOST_LAYERS = 3  # in the name of a product


@dataclass
class ReadFiles:
    """The contents of the files."""

    # Results, by problem and device; of several the fastest.
    records: dict[tuple[Problem, MeasuredDevice], Record] = field(default_factory=dict)
    histories: dict[str, History] = field(default_factory=dict)  # how the runs went, by the name of the journal
    calls: Counter[str] = field(default_factory=Counter)  # of each product in the logs of campaigns, by its key
    # The modules that call a product, by its name, as a workload says them.
    layers: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was left out, or could not be read
    damaged: bool = False  # whether any of it could not

    def add(self, records: Iterable[Record]) -> None:
        """Add results; of two of one problem on one device the faster is kept."""
        for record in records:
            known = self.records.get((record.problem, device_of(record)))
            if known is None or record.seconds < known.seconds:
                self.records[record.problem, device_of(record)] = record


def read(path: Path, defaults: Defaults, found: ReadFiles) -> None:
    """Read results and the journal beside them, a journal alone, a library, a campaign's folder, or shipped tables."""
    if str(path) == shipped_tables.NAME:
        read_shipped("", found)
        return
    if (path / CAMPAIGN).is_file():
        _read_campaign(path, defaults, found)
        return
    if storage.is_library(path) or path.is_dir():
        library = storage.open_library(path)
        found.add(entry.record for entry in library.all_entries())
        found.damaged |= bool(library.damaged)
        found.notes += [f"{path}: {entry}" for entry in library.damaged]
        return
    if _is_journal(path):
        _add_history(path, found)
        return
    held = sizes.from_results(path, defaults)
    if not held.rows:
        held.require_undamaged()
    found.add(row.record for row in held.rows if row.record is not None)
    found.damaged |= bool(held.damaged)
    found.notes += [f"Left out: {row.reason}" for row in held.damaged]
    if left := held.describe_untuned():
        found.notes.append(f"{path}: {left}.")
    beside = RunFiles(path).journal
    if beside.is_file():
        _add_history(beside, found)


def read_shipped(gpu: str, found: ReadFiles) -> None:
    """Read the shipped tables of a kind of GPU, such as h200, or "" for those of this machine's."""
    gbps = 0 if gpu else machine.memory_gbps(machine.find_machine(None))
    every = shipped_tables.find(gpu).rows if gpu else read_table(Path(shipped_tables.NAME)).rows
    fitting = [row.record for row in every if gpu or same_memory(row.shipped_for, gbps)]
    if not fitting:
        known = ", ".join(shipped_tables.names())
        advice = "lookup and report take one's name: --shipped GPU"
        raise InputError(f"no GPU is here that has shipped tables; there are: {known}; {advice}")
    found.add(fitting)


def _read_campaign(folder: Path, defaults: Defaults, found: ReadFiles) -> None:
    """Read a campaign's merged results, the journal of its tuning, and the calls in its log."""
    files_there = [path for name in (MERGED, TUNED) if (path := folder / name).is_file()]
    if not files_there:
        raise InputError(f"{folder}: this campaign has no results yet; continue it with tritongemm optimize")
    read(files_there[0], defaults, found)
    journal_file = RunFiles(folder / "tuned.yaml").journal
    if journal_file.is_file():
        _add_history(journal_file, found)
    found.calls.update({key: count for key, (count, _) in read_counts(folder).items()})


def _is_journal(path: Path) -> bool:
    """Return whether a file is a journal; a pipe, which can be opened only once, is none."""
    with suppress(OSError):
        start = files.read_regular(path.resolve(), len(journal.HEADER)) if path.is_file() else b""
        return bool(start) and journal.is_journal(start)
    return False


def _add_history(path: Path, found: ReadFiles) -> None:
    run_history = history.read(path)
    found.histories[path.name if path.name not in found.histories else str(path)] = run_history
    known = {problem for problem, _ in found.records}
    found.add(record for record in run_history.records if record.problem not in known)
    if run_history.unread:
        found.damaged = True
        found.notes.append(f"{path}: {run_history.unread} lines can't be read and are left out.")


def calls_of(workload: str | None, defaults: Defaults, found: ReadFiles) -> dict[Problem, float]:
    """Return how often each size of a workload is called, and a note on those without a result."""
    if not workload:
        return {problem: found.calls[problem.key] for problem, _ in found.records if problem.key in found.calls}
    calls: dict[Problem, float] = {}
    for row in sizes.from_file(Path(workload), defaults):
        calls[row.problem] = calls.get(row.problem, 0.0) + row.count
        names = dict.fromkeys(caller.rpartition(".")[2] for caller in row.callers)
        found.layers[name_product(row)] = "/".join(list(names)[:_MOST_LAYERS])
    absent = ReportData(tuple(found.records.values()), calls=calls).unserved
    if absent:
        share = sum(calls[p] * p.flops for p in absent) / sum(calls[p] * p.flops for p in calls)
        found.notes.append(
            f"{workload}: {len(absent)} of {len(calls)} sizes, {share:.1%} of the operations, have no result and are "
            f"left out, such as {absent[0].key}."
        )
    if len(absent) == len(calls):
        raise InputError(f"{workload}: none of its sizes has a result in the files named")
    return calls


def gathered(found: ReadFiles, sources: Sequence[str], calls: dict[Problem, float]) -> ReportData:
    """Return all of it; of too many results those that take most of the time."""
    records = tuple(found.records.values())
    targets = {device: target for device in dict.fromkeys(map(device_of, records)) if (target := _target(device))}
    predicted = sum(record.predicted for record in records)
    if predicted:
        found.notes.append(f"The times of {predicted} of {len(records)} results are predicted, not measured.")
    if len(records) > MOST_RECORDS:
        found.notes.append(f"Of {len(records)} results the {MOST_RECORDS} that take most time are shown.")
    data = ReportData(records, found.histories, targets, calls, tuple(sources), tuple(found.notes), found.layers)
    return data if len(records) <= MOST_RECORDS else replace(data, records=data.longest(MOST_RECORDS))


def _target(device: MeasuredDevice) -> Target | None:
    """Return the facts of a device; None for an architecture that is not known here."""
    units = {"compute_units": device.compute_units} if device.compute_units else {}
    with suppress(TargetError):
        return loader.load_target(device.arch, device.product, **units)
    return None
