"""Stage: merged results → times of reference and tuned kernels, in new processes that take turns."""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tritongemm.campaigns import raw_results
from tritongemm.campaigns.campaign import MERGED, MeasuringTools, OpenTools
from tritongemm.campaigns.comparison import Comparison, Contest, TrialLog, describe_run
from tritongemm.campaigns.raw_results import read_products
from tritongemm.campaigns.served_kernel import own_choice, served_config
from tritongemm.campaigns.tables import GEMMS, SUMMARY, read_number, read_rows
from tritongemm.campaigns.uplift import ComparedProduct
from tritongemm.campaigns.weights import MEASURED
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.record import Record
from tritongemm.hip_ext.machine import Machine, toolchain
from tritongemm.results.run_files import RunFiles
from tritongemm.tune.revalidate import compile_rows
from tritongemm.workloads import sizes

RAW = "results/raw_results.csv"  # what was measured, in the campaign's folder


def run_benchmark(folder: Path, open_tools: OpenTools, say: Callable[[str], None]) -> list[ComparedProduct]:
    """Measure a campaign's results beside the library, and write `RAW`."""
    with open_tools("the benchmark") as tools:
        return measure(folder, tools, say)


def measure(folder: Path, tools: MeasuringTools, say: Callable[[str], None]) -> list[ComparedProduct]:
    """Measure a campaign's results with tools that are open; arguments and errors as of `run_benchmark`."""
    machine = tools.machine
    contests = _contests(folder, _records(folder, machine), tools)
    run_files = RunFiles(
        folder / RAW.replace(".csv", ".yaml")
    )  # a path for its journal and its lock; no results are written to it
    run_files.hold()
    try:
        header = describe_run(contests, machine.target, toolchain(machine), tools.protocol, len(tools.openers))
        with closing(TrialLog(run_files.journal, header)) as log:
            products = Comparison(log, tools.openers, say).run(contests, machine.target)
        raw_results.write_products(folder / RAW, products, read_uncompared(folder, products).seconds)
    finally:
        run_files.release()
    failed = sum(bool(product.failure) for product in products)
    say(f"{folder / RAW}: {len(products)} GEMMs" + (f", of which {failed} could not be compared" if failed else ""))
    return products


def _records(folder: Path, machine: Machine) -> list[Record]:
    """Return the campaign's results for this machine's device."""
    path, target = folder / MERGED, machine.target
    records = read_records(path)
    units = (0, target.compute_units)
    mine = [r for r in records if r.target == target.name and r.compute_units in units]
    here = {r.problem: r for r in sorted(mine, key=lambda r: r.compute_units)}
    if not here:
        others = ", ".join(sorted({f"{r.target} of {r.compute_units or 'unsaid'} compute units" for r in records}))
        raise InputError(
            f"{path} has no result for {target.name} of {target.compute_units} compute units; it has some for {others}"
        )
    return [r for r in records if here.get(r.problem) is r]


def read_records(path: Path) -> list[Record]:
    """Return the results of a results file, one of each problem on each device."""
    records = [row.record for row in sizes.from_file(path, Defaults()) if row.record is not None]
    if not records:
        raise InputError(f"{path} has no results, only sizes; run --only tune first")
    return records


def _contests(folder: Path, records: Iterable[Record], tools: MeasuringTools) -> list[Contest]:
    """Return the contest of each result, compiled where the cache lacks it."""
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
    """Return how often the log calls each product, by its key, with the further columns of the list of products."""
    counts: dict[str, tuple[float, tuple[tuple[str, str], ...]]] = {}
    for where, row in read_rows(folder / GEMMS, ("problem", "call_count")):
        count = read_number(where, row, "call_count")
        if not count:
            raise InputError(f"{where} call_count must be above 0")
        if row["problem"] in counts:
            raise InputError(f"{where} is of {row['problem']}, as an earlier row is; equal GEMMs are one row")
        counts[row["problem"]] = count, tuple(row.items())
    return counts


@dataclass(frozen=True)
class UncomparedTime:
    """Time of the log's products that were not compared: a threshold cut them off, or their measuring failed."""

    seconds: float = 0.0  # of all their calls
    estimated_seconds: float = 0.0  # the part of it that was not measured


def read_uncompared(folder: Path, products: Iterable[ComparedProduct]) -> UncomparedTime:
    """Return the time of what was not compared, from the campaign's summary; none without a summary."""
    path, compared = folder / SUMMARY, {p.problem for p in products if p.reference_seconds is not None}
    if not path.exists():
        return UncomparedTime()
    rows = read_rows(path, ("problem", "total (us)"))
    others = [(where, row) for where, row in rows if row["problem"] not in compared]
    times = [1e-6 * (read_number(where, row, "total (us)") or 0.0) for where, row in others]
    guessed = [time for time, (_, row) in zip(times, others, strict=True) if row.get("baseline", MEASURED) != MEASURED]
    return UncomparedTime(math.fsum(times), math.fsum(guessed))


class MeasuredCampaign(Protocol):
    """The parts of a `Campaign` that measuring stages use."""

    @property
    def folder(self) -> Path:
        """The folder of the campaign's files."""

    @property
    def open_tools(self) -> OpenTools:
        """A function that opens the tools that measure."""

    @property
    def say(self) -> Callable[[str], None]:
        """A function that prints a line."""

    def fail(self, text: str) -> None:
        """Report a fault of one product; the others go on."""


def run(campaign: MeasuredCampaign) -> None:
    """Measure the campaign's results beside the library."""
    for product in run_benchmark(campaign.folder, campaign.open_tools, campaign.say):
        if product.failure:
            campaign.fail(f"not compared: {product.problem}: {product.failure}")


def why_again(campaign: MeasuredCampaign) -> str:
    """Return why the stage runs again; "" where it does not: only what a lost GPU left is measured."""
    try:
        failed = sum(bool(product.failure) for product in read_products(campaign.folder / RAW))
    except InputError as error:
        return f"{error}: done again"
    return f"{failed} GEMMs could not be compared: done again" if failed else ""
