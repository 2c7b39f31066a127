"""The files of tuned records that the environment names, as one table in memory; the files stay as they are.

Of rows that tell of one problem on one kind of device the fastest counts, of equally fast ones the first file's, and a
measured row before a predicted one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

from tritongemm.core.errors import InputError
from tritongemm.serving.loaded_tables import LoadedTable, read_table
from tritongemm.serving.record_table import RowKey, row_key
from tritongemm.serving.source_row import SourceRow
from tritongemm.system import settings
from tritongemm.system.printable import printable
from tritongemm.system.settings import AiterConfig

_LOG = logging.getLogger("tritongemm")


def read_configured() -> tuple[LoadedTable, ...]:
    """The tables that TRITONGEMM_CONFIG names, then those of AITER's variables, each without rows that another shadows.

    Each of AITER's variables is for one of its families, which tells files apart whose columns are the same.

    Raises:
        InputError: a file can't be read, or one of TRITONGEMM_CONFIG is missing or holds no tuned result.
    """
    named = settings.tuned_configs()
    tables = [read_table(path) for path in named]
    known = {os.path.realpath(path) for path in named}
    for config in settings.aiter_configs():
        if os.path.realpath(config.path) not in known and (table := _read_aiters(config)) is not None:
            tables.append(table)
            known.add(os.path.realpath(config.path))
    return merge(tables)


def _read_aiters(config: AiterConfig) -> LoadedTable | None:
    """A table of one of AITER's variables; as AITER does, one that is missing is passed over."""
    if not os.path.exists(config.path):
        _LOG.warning("%s: there is no such file; %s names it", printable(str(config.path)), config.variable)
        return None
    try:
        return read_table(config.path, config.family)
    except InputError as error:
        _LOG.warning("%s; none of its rows is served", error)
        return None


def merge(tables: Sequence[LoadedTable]) -> tuple[LoadedTable, ...]:
    """The tables without the rows that a better one shadows; one line is logged for all of those.

    Args:
        tables: in the order in which they are preferred where rows are equally fast.
    """
    best: dict[RowKey, SourceRow] = {}
    rows = [row for table in tables for row in table.rows]
    for row in rows:
        kept = best.setdefault(row_key(row), row)
        if _rank(row) < _rank(kept):
            best[row_key(row)] = row
    if shadowed := [row for row in rows if best[row_key(row)] is not row]:
        first = shadowed[0]
        _LOG.info(
            "%d of %d rows are shadowed by faster ones of the same problem and device; the first is %s, by %s",
            len(shadowed),
            len(rows),
            printable(first.where),
            printable(best[row_key(first)].where),
        )
    return tuple(replace(table, rows=tuple(row for row in table.rows if best[row_key(row)] is row)) for table in tables)


def _rank(row: SourceRow) -> tuple[bool, float]:
    return row.record.predicted, row.record.seconds
