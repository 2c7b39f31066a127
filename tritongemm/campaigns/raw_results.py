"""Reads and writes the CSV files of a campaign's benchmark: what was measured, kept, and dropped with its reason.

A row is of one product: the columns that the list of products has, then what was measured. Times are in microseconds;
samples of one process have a blank between them, and those of different processes a semicolon.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tritongemm.campaigns.tables import read_number, read_rows
from tritongemm.campaigns.uplift import ComparedProduct, percent_of_total
from tritongemm.core.errors import InputError
from tritongemm.system import files
from tritongemm.system.printable import printable

_ADVICE = "move it away, or make room, and run the same command again"
_MEASURED = (
    "problem", "call_count", "us_reference", "us_tuned", "ratio", "uplift_pct", "us_saved", "pct_of_total",
    "weighted_uplift_contribution_pct", "kernel_reference", "kernel_tuned", "kernel_changed", "error_reference",
    "error_tuned", "tolerance", "verified", "failure", "samples_us_reference", "samples_us_tuned",
)  # fmt: skip
_READ = (
    "problem", "call_count", "kernel_reference", "kernel_tuned", "error_reference", "error_tuned", "tolerance",
    "failure", "samples_us_reference", "samples_us_tuned",
)  # fmt: skip
REASON = "dropped"  # the column of why a row was not kept


def write_products(
    path: Path,
    products: Sequence[ComparedProduct],
    rest_seconds: float = 0.0,
    reasons: Mapping[str, str] | None = None,
    every: Sequence[ComparedProduct] | None = None,
) -> None:
    """Replace a file with a row for each product; with `reasons`, by key, it has a column of why each was dropped.

    Percentages are of the time of `every` product that was compared, and of `rest_seconds` of what was not.
    """
    shown = products if every is None else every
    own = list(dict.fromkeys(name for p in shown for name, _ in p.columns if name not in (*_MEASURED, REASON)))
    out = io.StringIO()
    columns = [*own, *_MEASURED, *([] if reasons is None else [REASON])]
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    shares = dict(
        zip(
            (p.problem for p in shown),
            percent_of_total([*(p.total_seconds for p in shown), rest_seconds]),
            strict=False,
        )
    )
    for product in products:
        reason = {} if reasons is None else {REASON: printable(reasons[product.problem])}
        writer.writerow({**dict(product.columns), **_cells(product, shares[product.problem]), **reason})
    files.check_place(path, lambda start: not start or b"kernel_reference" in start, "a table of a campaign", _ADVICE)
    files.atomic_write(path, out.getvalue(), _ADVICE)


def _cells(product: ComparedProduct, share: float) -> dict[str, str]:
    """Return the cells of a product by column."""
    reference, tuned, ratio = product.reference_seconds, product.tuned_seconds, product.ratio
    cells = {
        "problem": product.problem,
        "call_count": f"{product.count:.15g}",
        "us_reference": _us(reference),
        "us_tuned": _us(tuned),
        "pct_of_total": f"{share:.4f}",
        "kernel_reference": product.kernel_reference,
        "kernel_tuned": product.kernel_tuned,
        "kernel_changed": str(product.kernel_changed),
        "error_reference": _number(product.error_reference),
        "error_tuned": _number(product.error_tuned),
        "tolerance": _number(product.tolerance),
        "verified": str(product.error_tuned is not None),
        "failure": printable(product.failure),
        "samples_us_reference": _samples(product.samples_reference),
        "samples_us_tuned": _samples(product.samples_tuned),
    }
    if ratio is None or reference is None or tuned is None:
        return cells
    return cells | {
        "ratio": f"{ratio:.4f}",
        "uplift_pct": f"{100 * (ratio - 1):.2f}",
        "us_saved": f"{1e6 * (reference - tuned):.6g}",
        "weighted_uplift_contribution_pct": f"{share * (1 - 1 / ratio):.4f}",
    }


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.6g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _samples(samples: Iterable[Iterable[float]]) -> str:
    return ";".join(" ".join(f"{seconds * 1e6:.7g}" for seconds in taken) for taken in samples)


def read_products(path: Path) -> list[ComparedProduct]:
    """Return the products that `write_products` wrote."""
    products = []
    for where, row in read_rows(path, _READ):
        columns = tuple((name, value) for name, value in row.items() if name not in (*_MEASURED, REASON))
        products.append(
            ComparedProduct(
                row["problem"],
                read_number(where, row, "call_count") or 0.0,
                row["kernel_reference"],
                row["kernel_tuned"],
                _read_samples(where, row, "samples_us_reference"),
                _read_samples(where, row, "samples_us_tuned"),
                read_number(where, row, "error_reference", most=math.inf),
                read_number(where, row, "error_tuned", most=math.inf),
                read_number(where, row, "tolerance"),
                row["failure"],
                columns,
            )
        )
    return products


def _read_samples(where: str, row: Mapping[str, str], column: str) -> tuple[tuple[float, ...], ...]:
    taken = []
    for part in filter(None, row[column].split(";")):
        numbers = [read_number(where, {column: text}, column) for text in part.split()]
        if not all(numbers):
            raise InputError(f"{where} {column} must hold times above 0")
        taken.append(tuple(number / 1e6 for number in numbers if number))
    return tuple(taken)
