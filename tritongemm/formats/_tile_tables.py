"""The tables of tiles that vLLM and SGLang ship: a JSON file for each (N, K) and device, which the file's name tells.

Its members are M in quotes, each with the config of the server's own Triton kernel, or null where another kernel of
the server is to run. The servers take the config of the M that is nearest to the call's, so a table that tells few M
changes what runs at all others. What is written here is therefore dense: where an M of the servers' usual ladder has no
result, the table tells what the server runs there today.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tritongemm.core.config import Config
from tritongemm.core.dtypes import BY_ENCODING
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.printable import printable
from tritongemm.core.problem import MAX_DIM, PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.values import MOST
from tritongemm.formats._json_members import Member, read_members, with_members
from tritongemm.formats._rivals import by_device
from tritongemm.formats._rows import make_problem
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.search_spaces.loader import load_target, target_of_device

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
DIVISORS = (16, 32, 64, 128)  # of the depth that shares a scale

_TEMPLATE = "tile"  # the template of ours that is the servers' kernel: a program for each tile
_BLOCKS = {"BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k"}
_COUNTS = {"GROUP_SIZE_M": "group_m", "num_warps": "num_warps", "num_stages": "num_stages", "SPLIT_K": "split_k"}
_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
_OTHERS = {"num_ctas": "num_ctas", "SWAP_AB": "swap_ab"}  # read, but not written
_KEYS = (*_BLOCKS, *_COUNTS, *_OPTIONS, *_OTHERS)
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_DEVICE = re.compile(r"[\w()+.-]+", re.ASCII)  # a device's name as a part of a file's
_ENCODINGS = ("fp8e4m3fn", "fp8e4m3fnuz")


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


@dataclass(frozen=True)
class Kind:
    """What tables of one ``dtype=`` are of.

    Attributes:
        family: plug-in of numerics/families.
        dtype: of A and B.
        block: columns and depth that share a scale of B in that family; 0 where each column has one.
        default: what the server runs where no table tells; None for another kernel of its own.
        ladder: every M that a table written here tells.
        depths: values of BLOCK_SIZE_K that the server's kernel runs as they are, by the GPU's vendor; empty for any.
    """

    family: str
    dtype: str
    block: tuple[int, int] = (0, 0)
    default: Mapping[str, int] | None = None
    ladder: tuple[int, ...] = LADDER
    depths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """What a row holds: those of the default, or all but the order of the tiles, which the kernel then chooses."""
        return tuple(self.default or (*_BLOCKS, "num_warps", "num_stages"))


class TileTables(ServerFormat, abstract=True):
    """Tables of tiles of one server.

    Attributes:
        kinds: by the word behind ``dtype=`` in a file's name.
        name_of_table: a file's name.
        blanks: what of a device's name a file's name has a ``_`` for.
        shape: how a file's name tells the block of B that shares a scale.
    """

    suffixes = (".json",)
    keeps_folder = True
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
                problem = make_problem(defaults, _read_m(member), subject.n, subject.k, _given(kind))
                config = _read_config(member.value, kind)
                rows.append(FormatRow(problem, config, line=member.line, number=number, target=target))
            except InputError as error:
                where = f"{path}: row {number} (line {member.line}) M {printable(member.key)!r}"
                damaged.append(DamagedRow(number, member.line, f"{where}: {error}"))
        return ResultsFile(rows=tuple(rows), damaged=tuple(damaged))

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """The tables in which something changed, by their names.

        Where the server's own kernel can't be what won, the row that the server uses there today is kept or written.
        """
        untold = list[tuple[Record, str]]()
        tables: dict[Subject, dict[int, Record]] = defaultdict(dict)
        if before.get(""):
            raise InputError(f"{self.server} keeps a folder of such tables; name a folder")
        for rivals in by_device(records):
            record, subject = self._best(rivals), self._subject_of(rivals[0])
            if isinstance(subject, Support):
                untold.append((record, str(subject)))
            elif tables[subject].setdefault(record.problem.m, record) is not record:
                untold.append((record, "a result of a device of the same name is told"))
        files, told = dict[str, str](), 0
        for subject, found in tables.items():
            kind, name = self.kinds[subject.kind], self._file_name(subject)
            rows = {m: _row_or_reason(record, kind) for m, record in found.items()}
            foreign = {m: reason for m, reason in rows.items() if isinstance(reason, Support)}
            untold += [(found[m], f"{why}; {self.server} runs there what it runs today") for m, why in foreign.items()]
            told += len(rows) - len(foreign)
            values = {m: row for m, row in rows.items() if m not in foreign}
            text = before.get(name, "")
            new = _merged(Path(name), text, values, {*kind.ladder, *found}, kind)
            if new != text:
                files[name] = new
        return Translation(files, told, tuple(untold))

    def can_tell(self, config: Config) -> bool:
        """Whether the server's kernel may be launched so."""
        return any(_tells(_row_of(config, kind), config, kind) for kind in self.kinds.values())

    def list_sizes(self, n: int, k: int, defaults: Defaults) -> list[FormatRow]:
        """A size for each M of the ladder."""
        kind = self._kind(defaults.family, defaults.dtype_a)
        return [FormatRow(make_problem(defaults, m, n, k, _given(kind))) for m in kind.ladder]

    def limits(self, family: str, target: Target) -> SearchLimits:
        """The one template that is the server's kernel, without our own options and splits along K."""
        kind = self._kind(family)
        axes = [("block_k", kind.depths[target.vendor])] if target.vendor in kind.depths else []
        axes += [] if kind.default else [("group_m", (1,))]
        today = _read_config(kind.default, kind)
        return SearchLimits(1, (_TEMPLATE,), tuple(axes), _OPTIONS, (today,) if today else ())

    def _kind(self, family: str, dtype: str | None = None) -> Kind:
        """What a table of a family's products of some dtype is of.

        Raises:
            InputError: there is none; lists those there are.
        """
        fp8 = dtype is None or dtype in _ENCODINGS or dtype in BY_ENCODING
        wanted = "fp8" if fp8 else dtype
        found = [k for k in self.kinds.values() if k.family == registry.family_of(family)[0].name and k.dtype == wanted]
        if not found:
            known = ", ".join(f"{kind.family} of {kind.dtype}" for kind in self.kinds.values())
            raise InputError(f"{self.server} has no tables of family {family} of {wanted}; choose --family: {known}")
        return found[0]

    def _best(self, rivals: Sequence[Record]) -> Record:
        """Of the results of a problem the fastest that a row tells; the first where none is."""
        subject = self._subject_of(rivals[0])
        if isinstance(subject, Support):
            return rivals[0]
        kind = self.kinds[subject.kind]
        told = [record for record in rivals if isinstance(_row_or_reason(record, kind), dict)]
        return min(told, key=lambda record: record.seconds, default=rivals[0])

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
            return Support(f"{self.server}'s tables are of {families}, with plain B in columns and no bias, alone")
        if record.predicted:
            return Support("its time is a prediction, which no timer measured")
        device = self.blanks.sub("_", record.toolchain.get("device", ""))
        if not _DEVICE.fullmatch(device):
            return Support("it does not say on which device it was measured, which the name of a table tells")
        return Subject(problem.n, problem.k, device, word, self.kinds[word].block)


def _read_config(values: Any, kind: Kind) -> Config | None:
    """The config of a row; None where another kernel of the server is to run.

    Raises:
        InputError: a field is wrong; names it.
    """
    if values is None and kind.default is None:
        return None
    if not isinstance(values, dict):
        raise InputError(f"must be an object of {', '.join(kind.keys)}, not {printable(repr(values), 40)}")
    unknown = [key for key in values if key not in _KEYS]
    missing = [key for key in _BLOCKS if key not in values]
    if unknown or missing:
        wrong = f"{printable(unknown[0])} is no key of a row" if unknown else f"it has no {', '.join(missing)}"
        raise InputError(f"{wrong}; there are {', '.join(_KEYS)}")
    m, n, k = (_whole(values, key, 1) for key in _BLOCKS)
    counts: dict[str, Any] = {name: _whole(values, key, 1) for key, name in _COUNTS.items() if key in values}
    options = {name: _whole(values, name, 0) for name in _OPTIONS if name in values}
    options |= {name: int(_read_other(values, key)) for key, name in _OTHERS.items() if key in values}
    return replace(Config(_TEMPLATE, m, n, k), **counts, options=tuple(options.items()))


def _read_m(member: Member) -> int:
    if not _NUMBER.fullmatch(member.key) or int(member.key) > MAX_DIM:
        raise InputError(f"M must be a whole number from 1 to {MAX_DIM} in quotes, as in {LADDER[2]!s}")
    return int(member.key)


def _whole(values: Mapping[str, Any], key: str, least: int) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise InputError(f"{key} must be a whole number from {least} to {MOST}, not {printable(repr(value), 40)}")
    return value


def _read_other(values: Mapping[str, Any], key: str) -> int | bool:
    value = values[key]
    return value if isinstance(value, bool) else _whole(values, key, 0)


def _given(kind: Kind) -> dict[str, Any]:
    """What all problems of a kind have in common, as fields of `Problem`."""
    given = {"family": kind.family, "dtype_a": kind.dtype, "dtype_b": kind.dtype, "order_b": PLAIN}
    return {**given, "row_major_a": True, "row_major_b": False, "bias": "none"}


def _problem_of(kind: Kind, problem: Problem) -> Problem:
    """What a table of a kind would tell of these sizes."""
    given = _given(kind) | {"dtype_c": problem.dtype_c}
    if problem.dtype_a in _ENCODINGS and kind.dtype == "fp8":
        given |= {"dtype_a": problem.dtype_a, "dtype_b": problem.dtype_a}
    return make_problem(Defaults(), problem.m, problem.n, problem.k, given)


def _row_or_reason(record: Record, kind: Kind) -> dict[str, int] | Support | None:
    """What a table tells of a result: the config, null for another kernel of the server, or why it can't tell it."""
    config = record.config
    row = _row_of(config, kind)
    depths = kind.depths.get(load_target(record.target).vendor, (config.block_k,))
    if record.winner != config.backend:
        reason = f"{printable(record.winner)} won, which is not the server's kernel"
    elif not _tells(row, config, kind):
        reason = f"{config.short_name} won, which is not the server's kernel, or more than a row tells"
    elif config.block_k not in depths:
        reason = f"{config.short_name} won, and the server's kernel takes {', '.join(map(str, depths))} of K at once"
    else:
        return row
    return None if kind.default is None else Support(reason)


def _row_of(config: Config, kind: Kind) -> dict[str, int]:
    """What a row says of a config, all of it or not."""
    fields = _BLOCKS | _COUNTS
    row = {key: int(getattr(config, fields[key])) for key in kind.keys}
    return row | {name: config.option(name) for name in _OPTIONS if name in dict(config.options)}


def _tells(row: Mapping[str, int], config: Config, kind: Kind) -> bool:
    """Whether a row tells a config whole, which is then one of the server's kernel."""
    return config.is_generated and all(row[key] for key in _BLOCKS) and _read_config(row, kind) == config


def _merged(path: Path, text: str, values: Mapping[int, Any], needed: Iterable[int], kind: Kind) -> str:
    """A table's text with these rows, and one for each M that is needed.

    Raises:
        InputError: the text is no such table.
    """
    members = read_members(path, text) if text else []
    now = {_checked_m(path, member): member.value for member in members}
    if len(now) < len(members):
        raise InputError(f"{path} tells an M twice; keep one of its rows")

    rows = {m: _served(now, m, kind) for m in {*needed} - {*now}}
    rows |= {m: row for m, row in values.items() if m not in now or not _means(now[m], row, kind)}
    return with_members(text, members, {str(m): row for m, row in rows.items()}, int)


def _means(now: Any, row: Any, kind: Kind) -> bool:
    """Whether a row that is there says the same in other words."""
    try:
        return _read_config(now, kind) == _read_config(row, kind)
    except InputError:
        return False


def _served(now: Mapping[int, Any], m: int, kind: Kind) -> Any:
    """What the server runs at M with these rows: that of the nearest, or its default where there is none."""
    return now[min(now, key=lambda known: abs(known - m))] if now else kind.default


def _checked_m(path: Path, member: Member) -> int:
    try:
        return _read_m(member)
    except InputError as error:
        raise InputError(f"{path}: line {member.line}: {error}") from None
