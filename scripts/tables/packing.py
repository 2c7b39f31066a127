"""Packs made tables as the package ships them: neighbouring ranges of M of one kernel become one row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.tables.making import read_made
from scripts.tables.products import Product
from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.search_spaces.loader import load_target
from tritongemm.serving import shipped_tables, source_row
from tritongemm.tune.m_table import split_at_steps

_HEAD = "# made: "
_LEAST_GAIN = 1.02  # of a library's algorithm, else PyTorch's own choice serves, which follows the installed library
_DIGITS = 4  # of times and errors
_DROPPED = ("problem", "code", "notes")


def pack(made: Path, products: Sequence[Product], folder: Path = shipped_tables.FOLDER) -> str:
    """Write the tables of a file into the package, beside those of its GPU's other products; say what was written."""
    first = made.read_text(encoding="utf-8").split("\n", 1)[0]
    facts = json.loads(first.removeprefix(_HEAD))
    records = [record for record in read_made(made) if record.m_from]  # the others are races at held-out M
    toolchain = records[0].toolchain
    target = load_target(records[0].target, toolchain["device"], compute_units=records[0].compute_units)
    gbps = round(facts.pop("memory_gbps", 0) or target.hbm_gbps)
    known = {product.problem: product for product in products}
    tables: dict[Any, list[Record]] = {}
    for record in records:
        tables.setdefault(record.problem.at(1), []).append(_worthwhile(record))
    made_of = {
        problem: {
            "problem": {k: v for k, v in problem.to_json().items() if k != "m"},
            "layers": known[problem].layers if problem in known else (),
            "date": facts["date"],
            "rows": [{"m": r.problem.m, "result": _result(r)} for r in _joined(split_at_steps(rows), target)],
        }
        for problem, rows in tables.items()
    }
    path = folder / f"{toolchain['device'].split()[1].lower()}.json.gz"
    every = [product for problem, product in _packed(path).items() if problem not in made_of] + [*made_of.values()]
    results = [row["result"] for product in every for row in product["rows"]]
    common = {k: v for k, v in results[0].items() if all(result.get(k) == v for result in results)}
    for row in (row for product in every for row in product["rows"]):
        row["result"] = {k: v for k, v in row["result"].items() if k not in common}
    data = {
        "gpu": {"name": toolchain["device"], "target": target.name, "compute_units": target.compute_units,
                "memory_gbps": gbps},
        "made": facts | {k: v for k, v in toolchain.items() if k != "device"},
        "common": common,
        "products": every,
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))
    count = sum(len(product["rows"]) for product in made_of.values())
    return f"{path}: {count} of {len(records)} rows, {path.stat().st_size / 1024:.0f} KiB; {_held_out(records)}"


def _packed(path: Path) -> dict[Problem, dict[str, Any]]:
    """Return the tables that a file of the package has, each with complete rows; none where there is no file."""
    if not path.exists():
        return {}
    data = json.loads(gzip.decompress(path.read_bytes()))
    for product in data["products"]:
        product.setdefault("date", data["made"]["date"])
        for row in product["rows"]:
            row["result"] = data["common"] | row["result"]
    return {Problem.from_json({**product["problem"], "m": 1}): product for product in data["products"]}


def _worthwhile(record: Record) -> Record:
    """Return a row, which is PyTorch's where an algorithm of its library gains little over its own choice."""
    is_kernel = source_row.baseline_won(record) or brings_kernels(record.config)
    if is_kernel or not record.library_seconds or record.library_seconds >= _LEAST_GAIN * record.seconds:
        return record
    return replace(record, winner=record.library, held_out={})


def _joined(rows: Iterable[Record], target: Target) -> Iterator[Record]:
    """Yield the rows of one product, where those of neighbouring ranges that agree are one."""
    last: Record | None = None
    for row in sorted(rows, key=lambda record: record.problem.m):
        if last is not None and _agree(last, row, target):
            row = replace(row, m_from=last.m_from, held_out={**last.held_out, **row.held_out})
        elif last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def _agree(lower: Record, upper: Record, target: Target) -> bool:
    """Return whether two rows of neighbouring ranges call the same kernel."""
    if lower.winner != upper.winner or upper.m_from != lower.problem.m + 1:
        return False
    if source_row.baseline_won(lower):
        return True
    if lower.config != upper.config:
        return False
    if not brings_kernels(upper.config):
        return True
    ends = (upper.problem.at(lower.m_from), upper.problem)
    low, high = (compile_job(problem, upper.config, target) for problem in ends)
    return not isinstance(low, Support) and not isinstance(high, Support) and low.digest == high.digest


def _result(record: Record) -> dict[str, Any]:
    fields = {k: v for k, v in record.to_json().items() if k not in _DROPPED}
    return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in fields.items()}


def _held_out(records: Iterable[Record]) -> str:
    """Return the figures at held-out M in words."""
    seen = [(float(regret), float(share)) for record in records for regret, share in record.held_out.values()]
    if not seen:
        return "no held-out M"
    regrets, shares = [regret for regret, _ in seen], [share for _, share in seen if share]  # 0 where it did not race
    return (
        f"{len(seen)} held-out M: {fmean(regrets):.1%} slower than the best known on average, {max(regrets):.1%} at "
        f"worst; {fmean(shares):.3f} of the library's speed on average, {min(shares):.3f} at least"
    )
