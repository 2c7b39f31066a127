"""Stage: measured times → what truly gained, and by how much."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tritongemm.campaigns import raw_results
from tritongemm.campaigns.campaign import MERGED
from tritongemm.campaigns.served_kernel import own_choice, served_config
from tritongemm.campaigns.stages.benchmark import RAW, MeasuredCampaign, UncomparedTime, read_records, read_uncompared
from tritongemm.campaigns.uplift import CampaignUplift, ComparedProduct, drop_reason, summarise
from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.export.library.writing import publish, withdraw
from tritongemm.formats import results_format
from tritongemm.hip_ext.machine import find_machine
from tritongemm.system import files

FINAL, LIBRARY = "final.yaml", "final"  # the results that are kept, and the library of them
KEPT, DROPPED = "results/final_results.csv", "results/dropped_results.csv"


def run_filter(folder: Path, say: Callable[[str], None]) -> CampaignUplift:
    """Keep what truly gained: `KEPT`, `DROPPED` with the reasons, the kept results as `FINAL`, and their library."""
    products = raw_results.read_products(folder / RAW)
    records = _measured_records(folder, products)
    reasons = {product.problem: drop_reason(product) for product in products}
    kept = [product for product in products if not reasons[product.problem]]
    dropped = [product for product in products if reasons[product.problem]]
    uncompared = read_uncompared(folder, products)
    served = [record for product, record in zip(products, records, strict=True) if not reasons[product.problem]]
    _replace_results(served, folder / FINAL)
    raw_results.write_products(folder / DROPPED, dropped, uncompared.seconds, reasons, products)
    raw_results.write_products(folder / KEPT, kept, uncompared.seconds, None, products)
    uplift = summarise(kept, products, uncompared.seconds)
    say(uplift.describe())
    if uncompared.estimated_seconds:
        say(_describe_estimate(uncompared, products))
    final = f"; {folder / FINAL} has what is kept" if kept else ""
    say(f"{folder / KEPT}: {len(kept)} rows; {folder / DROPPED}: {len(dropped)}{final}")
    _replace_library(served, folder / LIBRARY, say)
    return uplift


def _measured_records(folder: Path, products: Iterable[ComparedProduct]) -> list[Record]:
    """Return the results whose kernels were measured, one for each product."""
    records = {(r.problem.key, (served_config(r) or own_choice()).name): r for r in read_records(folder / MERGED)}
    found = []
    for product in products:
        record = records.get((product.problem, product.kernel_tuned))
        if record is None:
            raise InputError(
                f"{folder / RAW} is of another kernel of {product.problem} than {folder / MERGED}: run --only "
                "benchmark again"
            )
        found.append(record)
    return found


def _replace_results(records: Sequence[Record], path: Path) -> None:
    """Write the kept results in place of those of an earlier filter, which are deleted where none are kept."""
    if records:
        files.atomic_write(path, results_format().write(records), "make room and run the same command again")
    else:
        path.unlink(missing_ok=True)


def _describe_estimate(uncompared: UncomparedTime, products: Iterable[ComparedProduct]) -> str:
    """Return which share of the log's time, and so of the time-weighted uplift, is an estimate."""
    total = uncompared.seconds + math.fsum(product.total_seconds for product in products)
    return (
        f"{uncompared.estimated_seconds / total:.1%} of the GEMM time was not compared and is an estimate, so the "
        "time-weighted uplift is one too; a summary that a GPU made has fewer of them"
    )


def _replace_library(records: Sequence[Record], path: Path, say: Callable[[str], None]) -> None:
    """Write the kept results as a library of code objects in place of an earlier one, deleted where none are kept."""
    published = publish(records, path, find_machine(None)) if records else None
    if published is not None:
        for line in published.describe_missing():
            say(line)
    if published is None or not published.built.entries:
        withdraw(path)
        return
    kernels = sum(entry.kernel is not None for entry in published.contents.entries.values())
    say(f"{path}: a library of {len(published.contents.entries)} results, {kernels} with kernels")


def run(campaign: MeasuredCampaign) -> None:
    """Keep what gained, and print the uplift."""
    run_filter(campaign.folder, campaign.say)


def why_again(campaign: MeasuredCampaign) -> str:
    """Return why the stage is done again; "" where it is not."""
    return "" if (campaign.folder / KEPT).exists() else f"{KEPT} is not there: done again"
