"""The tables of tiles that vLLM and SGLang ship: a JSON file for each (N, K) and device, which its name tells."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats._json_members import read_members
from tritongemm.formats._rivals import by_device
from tritongemm.formats._rows import make_problem
from tritongemm.formats._tile_rows import (
    DEVICE,
    DIVISORS,
    ENCODINGS,
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
from tritongemm.search_spaces.loader import load_target, target_of_device
from tritongemm.system.printable import printable

__all__ = ["DIVISORS", "Kind", "TileTables"]


@dataclass(frozen=True)
class Subject:
    """What the name of a table says.

    Attributes:
        n, k: columns and depth of the product.
        device: the device's name as file names have it.
        kind: the word behind ``dtype=``.
        block: columns and depth that share a scale of B; 0 where each column has one.
    """

    n: int
    k: int
    device: str
    kind: str
    block: tuple[int, int] = (0, 0)


class TileTables(ServerFormat, abstract=True):
    """Tables of tiles of one server.

    Attributes:
        kinds: by the word behind ``dtype=`` in a file's name.
        name_of_table: a file's name.
        blanks: what of a device's name a file's name has a ``_`` for.
        shape: how a file's name tells the block of B that shares a scale.
    """

    suffixes = (".json",)
    kinds: ClassVar[Mapping[str, Kind]]
    name_of_table: ClassVar[re.Pattern[str]]
    blanks: ClassVar[re.Pattern[str]]
    shape: ClassVar[str]

    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file has the name of a table, and holds a JSON object, or nothing yet."""
        return self._subject(path) is not None and (not text or text.lstrip().startswith("{"))

    def read(self, path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
        """A row for each M, in the order of the file; one with null has no config."""
        return list(self.read_usable(path, text, defaults).require_undamaged().rows)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """As `read`, with the damaged rows apart."""
        subject = self._subject(path)
        if subject is None:
            raise InputError(f"{path}: the sizes of {self.title} stand in its name, which is none of such a table")
        kind = self.kinds[subject.kind]
        if subject.block != kind.block:
            shape = ", ".join(map(str, subject.block))
            raise InputError(
                f"{path}: block_shape=[{shape}]: family {kind.family} has scales for {kind.block[0]} x {kind.block[1]} "
                "alone; the file can't be tuned or checked, and is left as it is"
            )
        target = target_of_device(subject.device)
        if target:
            defaults = replace(defaults, fp8_encoding=load_target(target).fp8)
        members = read_members(path, text)
        if not members:
            raise InputError(f"{path} tells no M; remove it, as the server can't use it either")
        rows, damaged = list[FormatRow](), list[DamagedRow]()
        seen: dict[str, int] = {}
        for number, member in enumerate(members, start=1):
            try:
                if seen.setdefault(member.key, number) != number:
                    raise InputError(f"repeats row {seen[member.key]}; keep one of them")
                problem = make_problem(defaults, read_m(member), subject.n, subject.k, kind.given)
                config = read_config(member.value, kind)
                rows.append(FormatRow(problem, config, line=member.line, number=number, target=target))
            except InputError as error:
                where = f"{path}: row {number} (line {member.line}) M {printable(member.key)!r}"
                damaged.append(DamagedRow(number, member.line, f"{where}: {error}"))
        return ResultsFile(rows=tuple(rows), damaged=tuple(damaged))

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """The tables in which something changed, by their names.

        Where the server's own kernel can't be what won, the row that the server uses there today is kept or written.
        """
        omitted = list[tuple[Record, str]]()
        tables: dict[Subject, dict[int, Record]] = defaultdict(dict)
        if before.get(""):
            raise InputError(f"{self.server} keeps a folder of such tables; name a folder")
        for rivals in by_device(records):
            record, subject = self._best(rivals), self._subject_of(rivals[0])
            if isinstance(subject, Support):
                omitted.append((record, str(subject)))
            elif tables[subject].setdefault(record.problem.m, record) is not record:
                omitted.append((record, "a result of a device of the same name is told"))
        files, written = dict[str, str](), 0
        for subject, found in tables.items():
            kind, name = self.kinds[subject.kind], self._file_name(subject)
            rows = {m: self._row_or_reason(record, kind) for m, record in found.items()}
            foreign = {m: reason for m, reason in rows.items() if isinstance(reason, Support)}
            omitted += [(found[m], f"{why}; {self.server} runs what it runs today") for m, why in foreign.items()]
            written += len(rows) - len(foreign)
            values = {m: row for m, row in rows.items() if m not in foreign}
            text = before.get(name, "")
            today = kind.default
            new = merged(Path(name), text, values, {*kind.ladder, *found}, kind, lambda m: today)  # noqa: B023

            if new != text:
                files[name] = new
        return Translation(files, written, tuple(omitted))

    def can_express(self, config: Config) -> bool:
        """Whether the server's kernel may be launched so."""
        return any(tells(row_of(config, kind), config, kind, self.backend) for kind in self.kinds.values())

    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """A size for each M of the ladder."""
        kind = find_kind(self.kinds.values(), self.server, defaults.family, defaults.dtype_a)
        return [FormatRow(make_problem(defaults, m, n, k, kind.given)) for m in tokens or kind.ladder]

    def limits(self, family: str, target: Target) -> SearchLimits:
        """The one template that is the server's kernel, without our own options and splits along K."""
        kind = find_kind(self.kinds.values(), self.server, family)
        axes = [("block_k", kind.depths[target.vendor])] if target.vendor in kind.depths else []
        axes += [] if kind.default else [("group_m", (1,))]
        today = read_config(kind.default, kind)
        return SearchLimits(1, (kind.template,), tuple(axes), OPTIONS, (today,) if today else ())

    def _best(self, rivals: Sequence[Record]) -> Record:
        """Of the results of a problem the fastest that a row tells, of the server's own kernel where that was raced.

        The first where none is told.
        """
        subject = self._subject_of(rivals[0])
        if isinstance(subject, Support):
            return rivals[0]
        kind = self.kinds[subject.kind]
        usable = [record for record in rivals if isinstance(self._row_or_reason(record, kind), dict)]
        usable = [record for record in usable if record.config.backend == self.backend] or usable
        return min(usable, key=lambda record: record.seconds, default=rivals[0])

    def _row_or_reason(self, record: Record, kind: Kind) -> dict[str, int] | Support | None:
        """What a table tells of a result: its config, None for the server's other kernel, or why it can't be told."""
        config = record.config
        row = row_of(config, kind)
        depths = kind.depths.get(load_target(record.target).vendor, (config.block_k,))
        if record.winner != config.backend:
            reason = f"{printable(record.winner)} won, which is not the server's kernel"
        elif not tells(row, config, kind, self.backend):
            reason = f"{config.short_name} won, which is not the server's kernel, or more than a row tells"
        elif config.block_k not in depths:
            reason = (
                f"{config.short_name} won, and the server's kernel takes {', '.join(map(str, depths))} of K at once"
            )
        else:
            return row
        return None if kind.default is None else Support(reason)

    def _subject(self, path: Path) -> Subject | None:
        match = self.name_of_table.fullmatch(path.name)
        if not match or match["kind"] not in self.kinds:
            return None
        words = match.groupdict()
        block = (int(words.get("block_n") or 0), int(words.get("block_k") or 0))
        return Subject(int(match["n"]), int(match["k"]), match["device"], match["kind"], block)

    def _file_name(self, subject: Subject) -> str:
        shape = self.shape.format(*subject.block) if any(subject.block) else ""
        return f"N={subject.n},K={subject.k},device_name={subject.device},dtype={subject.kind}{shape}.json"

    def _subject_of(self, record: Record) -> Subject | Support:
        """The table that tells a result, or why there is none."""
        problem = record.problem
        found = (word for word, kind in self.kinds.items() if problem == _problem_of(kind, problem))
        word = next(found, None)
        if word is None:
            families = " and ".join(dict.fromkeys(kind.family for kind in self.kinds.values()))
            return Support(
                f"{self.server}'s tables are of {families}, plain B in columns, the usual scales and no bias"
            )
        if record.predicted:
            return Support("its time is a prediction, which no timer measured")
        device = self.blanks.sub("_", record.toolchain.get("device", ""))
        if not DEVICE.fullmatch(device):
            return Support("it does not say on which device it was measured, which the name of a table tells")
        return Subject(problem.n, problem.k, device, word, self.kinds[word].block)


def _problem_of(kind: Kind, problem: Problem) -> Problem:
    """What a table of a kind would tell of these sizes."""
    given = kind.given | {"dtype_c": problem.dtype_c}
    if problem.dtype_a in ENCODINGS and kind.dtype == "fp8":
        given |= {"dtype_a": problem.dtype_a, "dtype_b": problem.dtype_a}
    return make_problem(Defaults(), problem.m, problem.n, problem.k, given)
