"""Reads and writes the tables of tiles of vLLM and SGLang: a JSON file for each (N, K) and device in its name."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats import _tile_rows
from tritongemm.formats._rows import by_device, make_problem
from tritongemm.search_spaces.loader import load_target, target_of_device
from tritongemm.system.printable import printable


class TileTables(_tile_rows.ServerTables, abstract=True):
    """Tables of products of one server."""

    name_of_table: ClassVar[re.Pattern[str]]

    def _is_name(self, name: str) -> bool:
        return self._subject(name) is not None

    def _subject(self, name: str) -> re.Match[str] | None:
        """Return the parts of a table's name; None for another name."""
        match = self.name_of_table.fullmatch(name)
        return match if match and match["kind"] in self.kinds else None

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a row for each M, in the order of the file; one with null has no config."""
        subject = self._subject(path.name)
        if subject is None:
            raise InputError(f"{path}: the sizes of {self.title} are in its name, which is not that of such a table")
        kind, words = self.kinds[subject["kind"]], subject.groupdict()
        block = (int(words.get("block_n") or 0), int(words.get("block_k") or 0))
        if block != kind.block:
            raise InputError(
                f"{path}: block_shape={list(block)}: family {kind.family} has scales for {kind.block[0]} x "
                f"{kind.block[1]} alone; the file can't be tuned or checked, and is left as it is"
            )
        target = target_of_device(words["device"])
        if target:
            defaults = replace(defaults, fp8_encoding=load_target(target).fp8)

        def make(m: int, config: Config | None) -> FormatRow:
            problem = make_problem(defaults, m, int(words["n"]), int(words["k"]), kind.given)
            return FormatRow(problem, config, target=target)

        found = _tile_rows.read_rows(path, text, kind, make)
        if not (found.rows or found.damaged):
            raise InputError(f"{path} has no M; remove it, as the server can't use it either")
        return found

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return the changed tables, by their names.

        Where the server's own kernel can't be what won, the row that the server uses there today is kept or written.
        """
        omitted = list[tuple[Record, str]]()
        tables: dict[_tile_rows.ServerTable, dict[int, Record]] = defaultdict(dict)
        for rivals in by_device(records):
            table = self._table_of(rivals[0])
            record = rivals[0] if isinstance(table, Support) else self._best(rivals, table.kind)
            if isinstance(table, Support):
                omitted.append((record, str(table)))
            elif tables[table].setdefault(record.problem.m, record) is not record:
                omitted.append((record, "a result of a device of the same name is written"))
        rows = {t: {m: self._row_or_reason(record, t.kind) for m, record in tables[t].items()} for t in tables}
        foreign = [(tables[t][m], row) for t in rows for m, row in rows[t].items() if isinstance(row, Support)]
        omitted += [(record, f"{reason}; {self.server} runs what it runs today") for record, reason in foreign]
        return Translation(self._changed(rows, before), sum(map(len, rows.values())) - len(foreign), tuple(omitted))

    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """Return a size for each M of the ladder."""
        kind = _tile_rows.find_kind(self.kinds.values(), self.server, defaults.family, defaults.a.dtype)
        return [FormatRow(make_problem(defaults, m, n, k, kind.given)) for m in tokens or kind.ladder]

    def limits(self, family: str, target: Target) -> SearchLimits:
        """Return the one template that is the server's kernel, without our own options and splits along K."""
        kind = _tile_rows.find_kind(self.kinds.values(), self.server, family)
        axes = [("block_k", kind.depths[target.vendor])] if target.vendor in kind.depths else []
        axes += [] if kind.default else [("group_m", (1,))]
        today = _tile_rows.read_config(kind.default, kind)
        return SearchLimits(1, (kind.template,), tuple(axes), _tile_rows.OPTIONS, (today,) if today else ())

    def _best(self, rivals: Sequence[Record], kind: _tile_rows.Kind) -> Record:
        """Return the fastest of a problem's results that a row holds, of the server's own kernel where that was raced.

        The first where a row holds none.
        """
        usable = [record for record in rivals if isinstance(self._row_or_reason(record, kind), dict)]
        usable = [record for record in usable if record.config.backend == self.backend] or usable
        return min(usable, key=lambda record: record.seconds, default=rivals[0])

    def _row_or_reason(self, record: Record, kind: _tile_rows.Kind) -> dict[str, int] | Support | None:
        """Return a result's row: None for the server's other kernel, or why it can't be written."""
        config = record.config
        depths = kind.depths.get(load_target(record.target).vendor, (config.block_k,))
        if record.winner != config.backend:
            reason = f"{printable(record.winner)} won, which is not the server's kernel"
        elif not self._holds(config, kind):
            reason = f"{config.name} won, which is not the server's kernel, or more than a row holds"
        elif config.block_k not in depths:
            reason = f"{config.name} won, and the server's kernel takes {', '.join(map(str, depths))} of K at once"
        else:
            return _tile_rows.row_of(config, kind)
        return None if kind.default is None else Support(reason)

    def _table_of(self, record: Record) -> _tile_rows.ServerTable | Support:
        """Return the table of a result, or why there is none."""
        problem = record.problem
        word = next((word for word, kind in self.kinds.items() if problem == _problem_of(kind, problem)), None)
        if word is None:
            families = " and ".join(dict.fromkeys(kind.family for kind in self.kinds.values()))
            return Support(
                f"{self.server}'s tables are of {families}, plain B in columns, the usual scales and no bias"
            )
        device, kind = self._device(record), self.kinds[word]
        if isinstance(device, Support):
            return device
        shape = self.shape.format(*kind.block) if any(kind.block) else ""
        name = f"N={problem.n},K={problem.k},device_name={device},dtype={word}{shape}.json"
        return _tile_rows.ServerTable(name, kind, load_target(record.target).vendor)


def _problem_of(kind: _tile_rows.Kind, problem: Problem) -> Problem:
    """Return the problem of a table's kind with these sizes."""
    given = kind.given | {"dtype_c": problem.c.dtype}
    if problem.a.dtype in _tile_rows.ENCODINGS and kind.dtype == "fp8":
        given |= {"dtype_a": problem.a.dtype, "dtype_b": problem.a.dtype}
    return make_problem(Defaults(), problem.m, problem.n, problem.k, given)
