"""Writes and reads a campaign's tables: `summary.csv` of all that a job called, `gemms.csv` of what is tuned."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritongemm.campaigns.workload import LoggedProduct
from tritongemm.core.errors import InputError
from tritongemm.formats import plain_text
from tritongemm.plugins.contracts.call_logs import LoggedCall
from tritongemm.system import reading
from tritongemm.system.printable import printable

SUMMARY, GEMMS = "summary.csv", "gemms.csv"
_CONFIG = re.compile(r"[A-Z0-9]{1,40}_[NTC]{2}_[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True)
class CampaignGemm:
    """A GEMM that is tuned."""

    config: str  # name of its config, such as `BBS_TN_0`
    problem: str  # its key


def write_summary(products: Iterable[LoggedProduct], configs: Mapping[int, str], threshold: float) -> str:
    """Return the text of `SUMMARY`: all products that the job called, those that take most first.

    `configs` has the name of each that is tuned, by its place; the others are below the threshold, in percent.
    """
    rows = []
    for place, one in enumerate(products):
        note = one.reason or ("" if place in configs else f"below {threshold:g} %")
        rows.append(
            {"config": configs.get(place, ""), "problem": one.problem.key if one.problem else ""}
            | _call_columns(one.call)
            | _more_columns(one.call)
            | _weight_columns(one)
            | {"line": one.line, "note": note}
        )
    return _write(rows)


def write_gemms(products: Mapping[str, LoggedProduct]) -> str:
    """Return the text of `GEMMS`: TuningDriver's columns, then further ones."""
    rows = []
    for name, one in products.items():
        assert one.problem is not None, "what is tuned can be computed"
        ours = {"config": name, "problem": one.problem.key}
        rows.append(_call_columns(one.call) | ours | _weight_columns(one))
    return _write(rows)


def _call_columns(call: LoggedCall) -> dict[str, object]:
    """Return the columns that TuningDriver has of a GEMM, in the library's terms."""
    return {
        "transA": call.transposes[0], "transB": call.transposes[1], "batch_count": call.batch, "m": call.m,
        "n": call.n, "k": call.k, "a_type": call.types[0], "b_type": call.types[1], "c_type": call.types[2],
        "d_type": call.types[3], "compute_type": f"c_{call.compute}",
    }  # fmt: skip


def _more_columns(call: LoggedCall) -> dict[str, object]:
    """Return further columns in which calls may differ: strides, factors, bias, activation and others."""
    leads = dict(zip(("lda", "ldb", "ldc", "ldd"), call.leads, strict=True))
    strides = dict(zip(("stride_a", "stride_b", "stride_c", "stride_d"), call.strides, strict=True))
    scales = dict(zip(("scaleA", "scaleB", "scaleC", "scaleD"), call.scales, strict=True))
    factors = {"alpha": call.alpha, "beta": call.beta, "bias_type": call.bias, "activation_type": call.activation}
    return {**leads, **strides, **factors, **scales, "others": "; ".join(call.others)}


def _weight_columns(one: LoggedProduct) -> dict[str, object]:
    count = int(one.count) if one.count.is_integer() else one.count
    return {
        "us": f"{one.seconds * 1e6:.6g}", "baseline": one.how, "call_count": count,
        "total (us)": f"{one.total_seconds * 1e6:.6g}", "% of total": f"{one.share:.4f}",
    }  # fmt: skip


def _write(rows: list[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def is_table(start: bytes) -> bool:
    """Return whether a file begins as a table of a campaign; TuningDriver's have other columns."""
    return not start or b"config,problem," in start.partition(b"\n")[0] + b","


def read_gemms(folder: Path) -> list[CampaignGemm]:
    """Return the GEMMs that a campaign tunes."""
    path = folder / GEMMS
    if not path.exists():
        raise InputError(f"{path}: there is no such file; the stage configs writes it: name the LOG")
    found = []
    for where, row in read_rows(path, ("config", "problem")):
        config, problem = row["config"], row["problem"]
        if not _CONFIG.fullmatch(config) or not problem:
            raise InputError(
                f"{where}: config {config[:60]!r} is no name of a config such as BBS_TN_0; run --only configs again"
            )
        found.append(CampaignGemm(config, problem))
    if not found:
        raise InputError(f"{path} holds no GEMM; run --only configs again")
    return found


def read_rows(path: Path, wanted: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of a CSV by column, each with its place for messages."""
    lines = csv.reader(io.StringIO(plain_text(reading.decode(path))), strict=True)
    rows = []
    try:
        head = next(lines, [])
        missing = [name for name in wanted if name not in head]
        if missing:
            raise InputError(
                f"{path}: line 1 has no column {', '.join(missing)}; the stage that writes it must run first"
            )
        for number, cells in enumerate(filter(None, lines), start=1):
            where = f"{path}: row {number} (line {lines.line_num})"
            if len(cells) != len(head):
                raise InputError(f"{where} has {len(cells)} cells, the head {len(head)}; it may be cut")
            rows.append((where, dict(zip(head, cells, strict=True))))
    except csv.Error as error:
        raise InputError(f"{path}: line {lines.line_num}: {error}") from None
    return rows


def read_number(where: str, row: Mapping[str, str], column: str, most: float = 1e300) -> float | None:
    """Return a number of at least 0; None where the cell is empty."""
    text = row[column].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise InputError(f"{where} {column} must be a number from 0 on, not {printable(repr(text), 40)}")
    return value
