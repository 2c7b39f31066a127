"""The tables of tiles that vLLM and SGLang ship for layers of experts: a JSON file for each (E, N) and device.

A row is for M tokens, each of which goes to some of E experts: its config runs both products of the layer, that of gate
and up (2 N columns) and that of down (depth N). The name of a table tells neither the hidden size nor how many experts
a token goes to, so it can't be read as sizes; what is written is told by the rows that a run was asked for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NoReturn

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import MAX_DIM, Problem
from tritongemm.core.record import Record
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.target import Target
from tritongemm.formats._json_members import read_members
from tritongemm.formats._rows import make_problem
from tritongemm.formats._tile_rows import (
    DEVICE,
    OPTIONS,
    Kind,
    find_kind,
    merged,
    read_config,
    read_m,
    row_of,
    tells,
)
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.search_spaces.loader import load_target
from tritongemm.system.printable import printable

BLOCK = (128, 128)  # columns and depth that share a scale of a weight
KINDS = ("fp8_w8a8",)
TEMPLATE = "grouped_tile"  # the template of ours that is the servers' kernel: a program for each tile of every group


@dataclass(frozen=True)
class ExpertKind(Kind):
    """What tables of experts of one ``dtype=`` are of.

    Attributes:
        steps: what the server runs without a table, by the GPU's vendor: up to so many tokens such a row.
    """

    steps: Mapping[str, tuple[tuple[int, Mapping[str, int]], ...]] = field(default_factory=dict)

    def today(self, tokens: int, vendor: str) -> dict[str, int]:
        """What the server runs for so many tokens without a table."""
        return next(dict(row) for most, row in self.steps[vendor] if tokens <= most)


def expert_kind(dtype: str, steps: Mapping[str, tuple[tuple[int, Mapping[str, int]], ...]]) -> ExpertKind:
    """Tables of experts with scales for 128 x 128 of a weight and 1 x 128 of a token."""
    row = steps["nvidia"][0][1]
    return ExpertKind(
        "a8w8_blockscale", dtype, BLOCK, row, template=TEMPLATE, scales="block_rows", remarks=("triton_version",),
        steps=steps,
    )  # fmt: skip


def table_row(m: int, n: int, group: int, stages: int) -> dict[str, int]:
    """A row of four warps that takes 128 of K at once."""
    return {
        "BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": group, "num_warps": 4,
        "num_stages": stages,
    }  # fmt: skip


class ExpertTables(ServerFormat, abstract=True):
    """Tables of experts of one server.

    Attributes:
        kinds: by the word behind ``dtype=`` in a file's name.
        shape: how a file's name tells the block of a weight that shares a scale.
        blanks: what of a device's name a file's name has a ``_`` for.
        device_words: devices whose names have such a word are all called so.
    """

    suffixes = (".json",)
    computes = "grouped"
    kinds: ClassVar[Mapping[str, ExpertKind]]
    shape: ClassVar[str]
    blanks: ClassVar[re.Pattern[str]]
    device_words: ClassVar[Mapping[str, str]] = {}

    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file has the name of a table, and holds a JSON object, or nothing yet."""
        return claims(path.name, self.shape) and (not text or text.lstrip().startswith("{"))

    def read(self, path: Path, text: str, defaults: Defaults) -> NoReturn:
        """None of its rows is a size.

        Raises:
            InputError: always; says what is wrong with a damaged file.
        """
        self.read_usable(path, text, defaults).require_undamaged()
        refuse_sizes(path)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """The damaged rows; the others are no sizes."""
        damaged = list[DamagedRow]()
        kind = next(iter(self.kinds.values()))
        for number, member in enumerate(read_members(path, text), start=1):
            try:
                if member.key not in kind.remarks:
                    read_m(member)
                    read_config(member.value, kind)
            except InputError as error:
                where = f"{path}: row {number} (line {member.line}) M {printable(member.key)!r}"
                damaged.append(DamagedRow(number, member.line, f"{where}: {error}"))
        return ResultsFile(damaged=tuple(damaged))

    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """The two products of the layer for each number of tokens: gate and up, then down.

        Raises:
            InputError: the server has no such table, or a token can't go to so many experts.
        """
        kind = find_kind(self.kinds.values(), self.server, defaults.family, defaults.dtype_a)
        if chosen > defaults.groups:
            raise InputError(f"a token can't go to {chosen} of {defaults.groups} experts")
        word = next(word for word, known in self.kinds.items() if known is kind)
        found = list[FormatRow]()
        for number, m in enumerate(tokens or kind.ladder, start=1):
            if m * chosen > MAX_DIM:
                raise InputError(f"{m} tokens of {chosen} experts each are more than {MAX_DIM} rows")
            subject = {"E": str(defaults.groups), "N": str(n), "M": str(m), "dtype": word}
            for columns, depth in ((2 * n, k), (k, n)):
                given = {**kind.given, "spread": defaults.spread} if not defaults.counts else kind.given
                problem = make_problem(defaults, m * chosen, columns, depth, {**given, "groups": defaults.groups})
                found.append(FormatRow(problem, number=number, subject=subject))
        return found

    def limits(self, family: str, target: Target) -> SearchLimits:
        """The one template that is the server's kernel, without options of our own."""
        kind = find_kind(self.kinds.values(), self.server, family)
        assert isinstance(kind, ExpertKind)
        today = (read_config(dict(row), kind) for _, row in kind.steps[target.vendor])
        first = tuple(dict.fromkeys(config for config in today if config is not None))
        return SearchLimits(1, (TEMPLATE,), (), OPTIONS, first)

    def can_express(self, config: Config) -> bool:
        """Whether the server's kernel may be launched so."""
        kind = next(iter(self.kinds.values()))
        return tells(row_of(config, kind), config, kind, self.backend)

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Nothing: results do not say of which layers they are."""
        reason = (
            f"{self.server}'s tables of experts tell tokens and layers, which results do not: write them with "
            f"tritongemm tune --for {self.server.lower()} --groups E --top_k K -n N -k HIDDEN"
        )
        return Translation({}, 0, tuple((record, reason) for record in records))

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """The tables in which something changed: of each layer the config that is fastest at both products together."""
        if before.get(""):
            raise InputError(f"{self.server} keeps a folder of such tables; name a folder")
        known: dict[Problem, list[Record]] = defaultdict(list)
        for record in records:
            known[record.problem].append(record)
        tables: dict[str, dict[int, Mapping[str, int]]] = defaultdict(dict)
        facts: dict[str, tuple[ExpertKind, str]] = {}
        written, omitted = 0, list[tuple[Record, str]]()
        asked = [row for row in rows if row.subject]
        for _, layer in groupby(asked, key=lambda row: row.number):
            stages = list(layer)
            found = [known[row.problem] for row in stages]
            best = self._best(found)
            if best is None:
                omitted += [(of_one[0], self._why_not(of_one[0])) for of_one in found if of_one]
                continue
            subject, kind = stages[0].subject, self.kinds[stages[0].subject["dtype"]]
            name = self._file_name(subject, best[0])
            tables[name][int(subject["M"])] = row_of(best[0].config, kind)
            facts[name] = kind, load_target(best[0].target).vendor
            written += len(stages)
        if not asked:
            return self.translate([record for group in known.values() for record in group[:1]], before)
        return Translation(dict(_texts(tables, facts, before)), written, tuple(omitted))

    def _best(self, stages: Sequence[Sequence[Record]]) -> list[Record] | None:
        """The results of the config that takes the least time for all products of a layer; None where none ran all.

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
        """Why a result can't be told, whatever its layer; "" where it can."""
        if record.predicted:
            return "its time is a prediction, which no timer measured"
        if not DEVICE.fullmatch(self._device(record)):
            return "it does not say on which device it was measured, which the name of a table tells"
        if not self.can_express(record.config):
            return f"{record.config.short_name} won, and none of the server's kernels ran both products of its layer"
        return ""

    def _device(self, record: Record) -> str:
        name = self.blanks.sub("_", record.toolchain.get("device", ""))
        return next((known for word, known in self.device_words.items() if word in name.split("_")), name)

    def _file_name(self, subject: Mapping[str, str], record: Record) -> str:
        where = f"E={subject['E']},N={subject['N']},device_name={self._device(record)}"
        return f"{where},dtype={subject['dtype']}{self.shape.format(*BLOCK)}.json"


def _texts(
    tables: Mapping[str, Mapping[int, Mapping[str, int]]],
    facts: Mapping[str, tuple[ExpertKind, str]],
    before: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """The tables that change, by their names."""
    for name, rows in tables.items():
        (kind, vendor), text = facts[name], before.get(name, "")

        def today(m: int, kind: ExpertKind = kind, vendor: str = vendor) -> dict[str, int]:
            return kind.today(m, vendor)

        new = merged(Path(name), text, rows, {*kind.ladder, *rows}, kind, today)
        if new != text:
            yield name, new


def claims(name: str, shape: str) -> bool:
    """Whether a file is called as a table of experts with scales of blocks, in a server's way to write their shape."""
    start = rf"E=[1-9][0-9]{{0,9}},N=[1-9][0-9]{{0,9}},device_name=[^,]*,dtype=(?:{'|'.join(KINDS)})"
    return re.fullmatch(f"{start}{re.escape(shape.format(*BLOCK))}\\.json", name) is not None


def refuse_sizes(path: Path) -> NoReturn:
    """Say that a table of experts holds no sizes.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"{path} tells tiles of a mixture of experts by M alone, without K and the experts of a token; it can't be "
        "tuned, checked or translated, and is left as it is"
    )
