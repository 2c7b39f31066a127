"""The tables of tiles that vLLM and SGLang ship for layers of experts: a JSON file for each (E, N) and device.

A row is for M tokens, each of which goes to some of E experts: its config runs both products of the layer, that of gate
and up (2 N columns) and that of down (depth N). The name of a table has neither the hidden size nor how many experts
a token goes to, so it can't be read as sizes; what to write follows from the rows that a run was asked for.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NoReturn

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import MAX_DIM, Problem
from tritongemm.core.record import Record
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats import _tile_rows
from tritongemm.formats._rows import make_problem
from tritongemm.search_spaces.loader import load_target

BLOCK = (SCALED_BLOCK, SCALED_BLOCK)  # columns and depth that share a scale of a weight
KINDS = ("fp8_w8a8",)
TEMPLATE = "grouped_tile"  # our template that is the servers' kernel: a program for each tile of every group


@dataclass(frozen=True)
class ExpertKind(_tile_rows.Kind):
    """What tables of experts of one ``dtype=`` are of."""

    # What the server runs without a table, by the GPU's vendor: a row for up to a number of tokens.
    steps: Mapping[str, tuple[tuple[int, Mapping[str, int]], ...]] = field(default_factory=dict)

    def today(self, tokens: int, vendor: str) -> Mapping[str, int]:
        """Return what the server runs for a number of tokens without a table."""
        return next(dict(row) for most, row in self.steps[vendor] if tokens <= most)


def expert_kind(dtype: str, steps: Mapping[str, tuple[tuple[int, Mapping[str, int]], ...]]) -> ExpertKind:
    """Return the kind of tables of experts with scales for 128 x 128 of a weight and 1 x 128 of a token."""
    row = steps["nvidia"][0][1]
    return ExpertKind(
        "a8w8_blockscale", dtype, BLOCK, row, template=TEMPLATE, scales="block_rows", remarks=("triton_version",),
        steps=steps,
    )  # fmt: skip


def table_row(m: int, n: int, group: int, stages: int) -> dict[str, int]:
    """Return a row of four warps that takes 128 of K at once."""
    return {
        "BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": SCALED_BLOCK, "GROUP_SIZE_M": group, "num_warps": 4,
        "num_stages": stages,
    }  # fmt: skip


class ExpertTables(_tile_rows.ServerTables, abstract=True):
    """Tables of experts of one server."""

    computes = "grouped"
    kinds: ClassVar[Mapping[str, ExpertKind]]

    def _is_name(self, name: str) -> bool:
        return claims(name, self.shape)

    def read(self, path: Path, text: str, defaults: Defaults) -> NoReturn:
        """Refuse a table of experts, as none of its rows is a size."""
        self.read_usable(path, text, defaults).require_undamaged()
        refuse_sizes(path)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return the damaged rows; the others are no sizes."""
        return _tile_rows.read_rows(path, text, next(iter(self.kinds.values())), lambda m, config: None)

    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """Return the two products of the layer for each number of tokens: gate and up, then down."""
        kind = _tile_rows.find_kind(self.kinds.values(), self.server, defaults.family, defaults.a.dtype)
        groups, count = defaults.groups, defaults.group_count
        if chosen > count:
            raise InputError(f"a token can't go to {chosen} of {count} experts")
        word = next(word for word, known in self.kinds.items() if known is kind)
        found = list[FormatRow]()
        for number, m in enumerate(tokens or kind.ladder, start=1):
            if m * chosen > MAX_DIM:
                raise InputError(f"{m} tokens of {chosen} experts each are more than {MAX_DIM} rows")
            subject = {"E": str(count), "N": str(n), "M": str(m), "dtype": word}
            for columns, depth in ((2 * n, k), (k, n)):
                given = kind.given | ({"spread": groups.spread} if groups and not groups.counts else {})
                problem = make_problem(defaults, m * chosen, columns, depth, {**given, "groups": count})
                found.append(FormatRow(problem, number=number, subject=subject))
        return found

    def limits(self, family: str, target: Target) -> SearchLimits:
        """Return the one template that is the server's kernel, without options of our own."""
        kind = _tile_rows.find_kind(self.kinds.values(), self.server, family)
        today = (_tile_rows.read_config(dict(row), kind) for _, row in kind.steps[target.vendor])
        first = tuple(dict.fromkeys(config for config in today if config is not None))
        return SearchLimits(1, (TEMPLATE,), (), _tile_rows.OPTIONS, first)

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Translate nothing: results do not name their layers."""
        reason = (
            f"{self.server}'s tables of experts hold tokens and layers, which results do not: write them with "
            f"tritongemm tune --for {self.server.lower()} --groups E --top_k K -n N -k HIDDEN"
        )
        return Translation({}, 0, tuple((record, reason) for record in records))

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """Return the tables that change, with each layer's config that is fastest at both products together."""
        known: dict[Problem, list[Record]] = defaultdict(list)
        for record in records:
            known[record.problem].append(record)
        tables: dict[_tile_rows.ServerTable, dict[int, Mapping[str, int]]] = defaultdict(dict)
        written, omitted = 0, list[tuple[Record, str]]()
        asked = [row for row in rows if row.subject]
        for _, layer in groupby(asked, key=lambda row: row.number):
            stages = list(layer)
            found = [known[row.problem] for row in stages]
            best = self._best(found)
            if best is None:
                omitted += [(of_one[0], self._why_not(of_one[0])) for of_one in found if of_one]
                continue
            subject = stages[0].subject
            table = self._table_of(subject, best[0])
            tables[table][int(subject["M"])] = _tile_rows.row_of(best[0].config, table.kind)
            written += len(stages)
        if not asked:
            return self.translate([record for group in known.values() for record in group[:1]], before)
        return Translation(self._changed(tables, before), written, tuple(omitted))

    def _best(self, stages: Sequence[Sequence[Record]]) -> list[Record] | None:
        """Return the results of the config that takes the least time for all products of a layer; or None.

        Where the server's own kernel was raced, its configs alone count.
        """
        timed = [
            {r.config: r for r in reversed(of_one) if r.winner == r.config.backend and not self._why_not(r)}
            for of_one in stages
        ]
        shared = [config for config in timed[0] if all(config in others for others in timed[1:])]
        shared = [config for config in shared if config.backend == self.backend] or shared
        layers = [[others[config] for others in timed] for config in shared]
        return min(layers, key=lambda layer: sum(record.seconds for record in layer), default=None)

    def _why_not(self, record: Record) -> str:
        """Return why a result can't be written, whatever its layer; "" where it can."""
        if isinstance(device := self._device(record), Support):
            return str(device)
        if not self.can_express(record.config):
            return f"{record.config.short_name} won, and none of the server's kernels ran both products of its layer"
        return ""

    def _table_of(self, subject: Mapping[str, str], record: Record) -> _tile_rows.ServerTable:
        """Return the table of a result's layer."""
        where = f"E={subject['E']},N={subject['N']},device_name={self._device(record)}"
        name = f"{where},dtype={subject['dtype']}{self.shape.format(*BLOCK)}.json"
        return _tile_rows.ServerTable(name, self.kinds[subject["dtype"]], load_target(record.target).vendor)


def claims(name: str, shape: str) -> bool:
    """Return whether a file has the name of a table of experts with scales of blocks, in a server's spelling."""
    start = rf"E=[1-9][0-9]{{0,9}},N=[1-9][0-9]{{0,9}},device_name=[^,]*,dtype=(?:{'|'.join(KINDS)})"
    return re.fullmatch(f"{start}{re.escape(shape.format(*BLOCK))}\\.json", name) is not None


def refuse_sizes(path: Path) -> NoReturn:
    """Refuse a table of experts as a file of sizes."""
    raise InputError(
        f"{path} holds tiles of a mixture of experts by M alone, without K and the experts of a token; it can't be "
        "tuned, checked or translated, and is left as it is"
    )
