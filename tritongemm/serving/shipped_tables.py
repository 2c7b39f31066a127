"""The tables over M that come along in this package: one packed file for each kind of GPU that they were made on."""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.serving.source_row import SourceRow

NAME = "shipped"  # what `load`, TRITONGEMM_CONFIG and lookup call these tables
FOLDER = Path(__file__).with_name("shipped")
_SUFFIX = ".json.gz"


@dataclass(frozen=True)
class ShippedTables:
    """The tables of one kind of GPU."""

    name: str  # of the file, such as `h200`
    gpu: Mapping[str, Any]  # its facts: `name`, `target`, `compute_units` and `memory_gbps`
    made: Mapping[str, Any]  # `date`, `driver` and whatever else their maker states
    rows: tuple[SourceRow, ...]  # all rows, each with the layers that call its product in its place


def files() -> list[Path]:
    """Return the packed files, in the order of their names."""
    return sorted(FOLDER.glob(f"*{_SUFFIX}"))


def read() -> list[ShippedTables]:
    """Return the tables of every GPU that some were made on.

    Raises:
        InputError: there are none, or a file is damaged.
    """
    if not files():
        raise InputError(f"this installation has no shipped tables in {FOLDER}; scripts/make_tables makes them")
    return [_read(path) for path in files()]


def names() -> list[str]:
    """Return the names of the GPUs that there are tables of, such as ``h200``."""
    return [path.name.removesuffix(_SUFFIX) for path in files()]


def find(name: str) -> ShippedTables:
    """Return the tables of one kind of GPU, by the name of its file, such as ``h200``.

    Raises:
        InputError: there are none, or the file is damaged.
    """
    known = dict(zip(names(), files(), strict=True))
    if name.lower() not in known:
        raise InputError(f"there are no shipped tables of {name}; there are: {', '.join(known) or 'none'}")
    return _read(known[name.lower()])


@cache
def _read(path: Path) -> ShippedTables:
    name = path.name.removesuffix(_SUFFIX)
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        gpu, common = data["gpu"], data["common"]
        rows = list[SourceRow]()
        for product in data["products"]:
            problem = Problem.from_json({**product["problem"], "m": 1})
            date = product.get("date", data["made"]["date"])
            where = f"shipped tables of {name}, {date} ({'; '.join(product['layers'])})"
            for row in product["rows"]:
                record = Record.from_json(common | row["result"], problem.at(row["m"]))
                rows.append(SourceRow(record, NAME, where, shipped_for=gpu["memory_gbps"]))
        return ShippedTables(name, gpu, data["made"], tuple(rows))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the shipped tables are damaged ({error}); install tritongemm again") from None
