"""Format: the results file of this project, a YAML list of maps: tune_gemm's keys first, then ours.

The first line, a remark, has the number of the schema: ``# Tuned by tritongemm, schema 2: …``. A file of a newer schema
is refused. tune_gemm passes over our keys. `_gemm_rows` says what each key means.
"""

import warnings
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tritongemm.core.errors import InputError, RemarkWarning
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.core.record import SCHEMA, Record
from tritongemm.formats._gemm_rows import has_our_keys, make_row, make_size, read_rows
from tritongemm.formats._yaml_rows import flow, is_row_list
from tritongemm.plugins.contracts import ResultsFormat

_HEAD = (
    f"# Tuned by tritongemm, schema {SCHEMA}: tune_gemm's keys, then tritongemm's. With timer: model, times are "
    "predictions.\n"
)


class NativeYaml(ResultsFormat):
    """This project's results file, and lists of sizes with its keys."""

    title = "the YAML of our results, a list of maps"
    suffixes = (".yaml", ".yml")

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether a file is a YAML list that has this project's first line or keys."""
        return is_row_list(path, text) and has_our_keys(text)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return the rows of a file, in its order; a warning names ranges of M that overlap."""
        results = read_rows(path, text, defaults)
        if not (results.rows or results.damaged):
            raise InputError(f"{path} holds an empty list")
        if overlaps := list(_overlaps(results.rows)):
            lower, upper = overlaps[0]
            others = f"; further pairs of rows that overlap: {len(overlaps) - 1}" if len(overlaps) > 1 else ""
            warnings.warn(
                f"{lower.where(str(path))} and row {upper.number} (line {upper.line}) serve ranges of M that overlap "
                f"({lower.problem.key}, {upper.problem.key}); where both do, the first is used{others}",
                RemarkWarning,
                stacklevel=2,
            )
        return results

    def read_results(self, path: Path, text: str, defaults: Defaults | None = None) -> ResultsFile:
        """Return the rows of a file, none of which is damaged."""
        return read_rows(path, text, defaults or Defaults()).require_undamaged()

    def write(self, records: Iterable[Record]) -> str:
        """Return the records as a file, one line each, in the order given."""
        return _HEAD + "".join(f"- {flow(make_row(r))}\n" for r in records)

    def write_sizes(self, rows: Iterable[FormatRow]) -> str:
        """Return sizes, one line each, in the order given."""
        return "".join(f"- {flow(make_size(row))}\n" for row in rows)


def _overlaps(rows: Iterable[FormatRow]) -> Iterator[tuple[FormatRow, FormatRow]]:
    """Yield the rows of one product and device whose ranges of M overlap, the one with the smaller largest M first."""
    ranges: dict[object, list[FormatRow]] = {}
    for row in rows:
        if (record := row.record) is not None and record.m_from:
            ranges.setdefault((row.problem.at(1), record.target, record.compute_units), []).append(row)
    for several in ranges.values():
        for lower, upper in pairwise(sorted(several, key=lambda row: row.problem.m)):
            if upper.record is not None and upper.record.m_from <= lower.problem.m:
                yield lower, upper
