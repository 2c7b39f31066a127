"""Stages of a campaign's end: what was tuned is measured beside what runs untuned, and what truly gained is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tritongemm.campaigns import raw_results
from tritongemm.campaigns.comparison import (
    Comparison,
    Contest,
    TrialLog,
    describe_run,
    own_choice,
    served_config,
)
from tritongemm.campaigns.measuring import MeasuringTools, OpenTools
from tritongemm.campaigns.uplift import CampaignUplift, ComparedProduct, drop_reason, summarise
from tritongemm.core import files
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.record import Record
from tritongemm.export.library.publishing import publish, withdraw
from tritongemm.formats import results_format
from tritongemm.results.run_files import RunFiles
from tritongemm.runtime.machine import Machine, find_machine, toolchain
from tritongemm.tuning.revalidate import compile_rows
from tritongemm.workloads import sizes

TUNED, PRODUCTS, SUMMARY = "merged.yaml", "gemms.csv", "summary.csv"  # what the stages before leave in the folder
_MEASURED = "measured"  # the summary's word for a time that is no estimate
FINAL, LIBRARY = "final.yaml", "final"  # the results that are kept, and the library of them
RAW, KEPT, DROPPED = "results/raw_results.csv", "results/final_results.csv", "results/dropped_results.csv"


def run_benchmark(folder: Path, open_tools: OpenTools, say: Callable[[str], None]) -> list[ComparedProduct]:
    """Measure a campaign's results beside the library, and write `RAW`.

    Args:
        folder: the campaign's.
        open_tools: what measures.
        say: told what is done.

    Raises:
        TargetError: there is no GPU; nothing has been written.
        InputError: a file of the campaign is wrong.
        OutputError: the results can't be written, or another benchmark holds them.
    """
    with open_tools("the benchmark") as tools:
        return measure(folder, tools, say)


def measure(folder: Path, tools: MeasuringTools, say: Callable[[str], None]) -> list[ComparedProduct]:
    """As `run_benchmark`, with what measures."""
    machine = tools.machine
    records = _records(folder, machine)
    contests = _contests(folder, records, tools)
    run_files = RunFiles(folder / RAW.replace(".csv", ".yaml"))  # no results of ours: its journal and its lock
    run_files.hold()
    try:
        header = describe_run(contests, machine.target, toolchain(machine), tools.protocol, len(tools.openers))
        with closing(TrialLog(run_files.journal, header)) as log:
            products = Comparison(log, tools.openers, say).run(contests, machine.target)
        raw_results.write_products(folder / RAW, products, read_rest(folder, products).seconds)
    finally:
        run_files.release()
    failed = sum(bool(product.failure) for product in products)
    say(f"{folder / RAW}: {len(products)} GEMMs" + (f", of which {failed} could not be compared" if failed else ""))
    return products


def _records(folder: Path, machine: Machine) -> list[Record]:
    """The campaign's results for this machine's device.

    Raises:
        InputError: there are none; or the file is wrong.
    """
    path, target = folder / TUNED, machine.target
    records = read_records(path)
    units = (0, target.compute_units)
    here = {r.problem: r for r in sorted(records, key=lambda r: r.compute_units) if _is_of(r, target.name, units)}
    if not here:
        others = ", ".join(sorted({f"{r.target} of {r.compute_units or 'unsaid'} compute units" for r in records}))
        raise InputError(
            f"{path} has no result for {target.name} of {target.compute_units} compute units; it has some for {others}"
        )
    return [r for r in records if here.get(r.problem) is r]


def _is_of(record: Record, target: str, compute_units: Sequence[int]) -> bool:
    return record.target == target and record.compute_units in compute_units


def read_records(path: Path) -> list[Record]:
    """The results of a file of ours, one of each problem on each device.

    Raises:
        InputError: it is wrong, or has none.
    """
    records = [row.record for row in sizes.from_file(path, Defaults()) if row.record is not None]
    if not records:
        raise InputError(f"{path} has no results, only sizes; run --only tune first")
    return records


def _contests(folder: Path, records: Iterable[Record], tools: MeasuringTools) -> list[Contest]:
    """What is to be measured of each result, compiled where the cache lacks it."""
    counts, choice = read_counts(folder), own_choice()
    rows: list[FormatRow] = []
    for record in records:
        rows.append(FormatRow(record.problem, choice))
        if (config := served_config(record)) is not None:
            rows.append(FormatRow(record.problem, config, target=record.target))
    contests: dict[str, Contest] = {}
    for row, artifact in compile_rows(rows, tools.machine.target, tools.pool):
        key, known = row.problem.key, contests.get(row.problem.key)
        count, columns = counts.get(key, (0.0, ()))  # another campaign's product saves nothing of this log's time
        reference = artifact if known is None else known.reference
        contests[key] = Contest(row.problem, reference, None if known is None else artifact, count, columns)
    return list(contests.values())


def read_counts(folder: Path) -> dict[str, tuple[float, tuple[tuple[str, str], ...]]]:
    """Calls of each product in the log, by its key, and what else the list of products says of it.

    Raises:
        InputError: the list is wrong; names row, line and column.
    """
    counts: dict[str, tuple[float, tuple[tuple[str, str], ...]]] = {}
    for where, row in raw_results.read_rows(folder / PRODUCTS, ("problem", "call_count")):
        count = raw_results.read_number(where, row, "call_count")
        if not count:
            raise InputError(f"{where} call_count must be above 0")
        if row["problem"] in counts:
            raise InputError(f"{where} is of {row['problem']}, as an earlier row is; equal GEMMs are one row")
        counts[row["problem"]] = count, tuple(row.items())
    return counts


@dataclass(frozen=True)
class Rest:
    """Time of the log's products that were not compared: a threshold cut them off, or their measuring failed.

    Attributes:
        seconds: of all their calls.
        estimated_seconds: the part of it that nobody measured.
    """

    seconds: float = 0.0
    estimated_seconds: float = 0.0


def read_rest(folder: Path, products: Iterable[ComparedProduct]) -> Rest:
    """What was not compared, as the campaign's summary says; nothing without a summary.

    Raises:
        InputError: the summary is wrong.
    """
    path, compared = folder / SUMMARY, {p.problem for p in products if p.reference_seconds is not None}
    if not path.exists():
        return Rest()
    rows = raw_results.read_rows(path, ("problem", "total (us)"))
    others = [(where, row) for where, row in rows if row["problem"] not in compared]
    times = [1e-6 * (raw_results.read_number(where, row, "total (us)") or 0.0) for where, row in others]
    guessed = [
        time for time, (_, row) in zip(times, others, strict=True) if row.get("baseline", _MEASURED) != _MEASURED
    ]
    return Rest(math.fsum(times), math.fsum(guessed))


def run_filter(folder: Path, say: Callable[[str], None]) -> CampaignUplift:
    """Keep what truly gained: `KEPT`, `DROPPED` with a reason for each, and the kept results as `FINAL`.

    Args:
        folder: the campaign's.
        say: told the uplift.

    Raises:
        InputError: a file is wrong, or the benchmark is of other kernels than the results.
        OutputError: the results can't be written.
    """
    products = raw_results.read_products(folder / RAW)
    records = {(r.problem.key, (served_config(r) or own_choice()).name): r for r in read_records(folder / TUNED)}
    for product in products:
        if (product.problem, product.kernel_tuned) not in records:
            raise InputError(
                f"{folder / RAW} is of another kernel of {product.problem} than {folder / TUNED}: run --only benchmark "
                "again"
            )
    reasons = {product.problem: drop_reason(product) for product in products}
    kept = [product for product in products if not reasons[product.problem]]
    dropped = [product for product in products if reasons[product.problem]]
    rest = read_rest(folder, products)
    served = [records[p.problem, p.kernel_tuned] for p in kept]
    if served:
        text = results_format().write_results(served)
        files.atomic_write(folder / FINAL, text, "make room and run the same command again")
    else:
        (folder / FINAL).unlink(missing_ok=True)  # what an earlier filter kept
    raw_results.write_products(folder / DROPPED, dropped, rest.seconds, reasons, products)
    raw_results.write_products(folder / KEPT, kept, rest.seconds, None, products)
    uplift = summarise(kept, products, rest.seconds)
    say(uplift.tell())
    if rest.estimated_seconds:
        whole = rest.seconds + math.fsum(product.total_seconds for product in products)
        say(
            f"{rest.estimated_seconds / whole:.1%} of the GEMM time was not compared and is an estimate, so the "
            "time-weighted uplift is one too; a summary that a GPU made has fewer of them"
        )
    final = f"; {folder / FINAL} has what is kept" if kept else ""
    say(f"{folder / KEPT}: {len(kept)} rows; {folder / DROPPED}: {len(dropped)}{final}")
    _replace_library(served, folder / LIBRARY, say)
    return uplift


def _replace_library(records: Sequence[Record], path: Path, say: Callable[[str], None]) -> None:
    """Write the kept results as a library of code objects in place of an earlier one, which goes where there are none.

    Raises:
        OutputError: it can't be written, or something else than a library is there.
    """
    published = publish(records, path, find_machine(None)) if records else None
    if published is not None:
        for line in published.tell_missing():
            say(line)
    if published is None or not published.built.entries:
        withdraw(path)
        return
    kernels = sum(entry.kernel is not None for entry in published.contents.entries.values())
    say(f"{path}: a library of {len(published.contents.entries)} results, {kernels} with kernels")
