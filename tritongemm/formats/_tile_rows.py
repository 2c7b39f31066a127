"""Holds what tables of vLLM and SGLang share: rows of an M each, with a config of the server's Triton kernel.

A row may be null, where another kernel of the server is to run. The servers take the row of the M that is nearest to
the call's, so a table with few M changes what runs at all others. What is written here is therefore dense: where
an M of the servers' usual ladder has no result, the table has what the server runs there today.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tritongemm.core.config import DEFAULT_BACKEND, Config
from tritongemm.core.dtypes import BY_ENCODING
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow, ResultsFile
from tritongemm.core.problem import MAX_DIM, PLAIN
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._json_members import Member, read_integer, read_members, with_members
from tritongemm.formats._rows import RowFaults
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.system.printable import printable

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
DIVISORS = (16, 32, 64, 128)  # of the depth that shares a scale
ENCODINGS = ("fp8e4m3fn", "fp8e4m3fnuz")
OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
_DEVICE = re.compile(r"[\w()+.-]+", re.ASCII)  # a device's name as a part of a file's

_BLOCKS = {"BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k"}
_COUNTS = {"GROUP_SIZE_M": "group_m", "num_warps": "num_warps", "num_stages": "num_stages", "SPLIT_K": "split_k"}
_OTHERS = {"num_ctas": "num_ctas", "SWAP_AB": "swap_ab"}  # read, but not written
_KEYS = (*_BLOCKS, *_COUNTS, *OPTIONS, *_OTHERS)
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class Kind:
    """What tables of one ``dtype=`` are of."""

    family: str  # plug-in of numerics/families
    dtype: str  # of A and B
    # Columns and depth that share a scale of B in that family; 0 where each column has one.
    block: tuple[int, int] = (0, 0)
    default: Mapping[str, int] | None = None  # what the server runs without a table; None for another kernel of its own
    ladder: tuple[int, ...] = LADDER  # every M of a table written here
    # Values of BLOCK_SIZE_K that the server's kernel runs as they are, by the GPU's vendor; empty for any.
    depths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    template: str = "tile"  # of ours, that is the server's kernel
    scales: str = ""  # name of the scale factors' granularity; "" for the family's usual one
    remarks: tuple[str, ...] = ()  # keys of a table that are no M and are left as they are
    more: tuple[str, ...] = ()  # keys that a row has where the server's own kernel ran with them, and nowhere else

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a row: those of the default, or all but the order of the tiles, which the kernel then chooses."""
        return tuple(self.default or (*_BLOCKS, "num_warps", "num_stages"))

    def today(self, m: int, vendor: str) -> Mapping[str, int] | None:
        """Return what the server runs for M on a vendor's GPUs without a table; None for another kernel of its own."""
        return self.default

    @property
    def given(self) -> dict[str, Any]:
        """Return the values that all problems of the kind share, as fields of `Problem`."""
        given = {"family": self.family, "dtype_a": self.dtype, "dtype_b": self.dtype, "order_b": PLAIN}
        given |= {"scales": self.scales} if self.scales else {}
        return {**given, "row_major_a": True, "row_major_b": False, "bias": "none"}


K = TypeVar("K", bound=Kind)


@dataclass(frozen=True)
class ServerTable:
    """A table to be written."""

    name: str
    kind: Kind = field(compare=False)
    vendor: str = field(compare=False)


def find_kind(kinds: Iterable[K], server: str, family: str, dtype: str = "") -> K:
    """Return the kind of a server's table of a family's products of some dtype."""
    known = list(kinds)
    wanted = "fp8" if not dtype or dtype in ENCODINGS or dtype in BY_ENCODING else dtype
    name = registry.family_of(family)[0].name
    found = next((kind for kind in known if kind.family == name and kind.dtype == wanted), None)
    if found is None:
        names = ", ".join(f"{kind.family} of {kind.dtype}" for kind in known)
        raise InputError(f"{server} has no tables of family {family} of {wanted}; choose --family: {names}")
    return found


def read_config(values: Any, kind: Kind) -> Config | None:
    """Return the config of a row; None where another kernel of the server is to run."""
    if values is None and kind.default is None:
        return None
    if not isinstance(values, dict):
        raise InputError(f"must be an object of {', '.join(kind.keys)}, not {printable(repr(values), 40)}")
    unknown = [key for key in values if key not in _KEYS]
    missing = [key for key in _BLOCKS if key not in values]
    if unknown or missing:
        wrong = f"{printable(unknown[0])} is no key of a row" if unknown else f"it has no {', '.join(missing)}"
        raise InputError(f"{wrong}; there are {', '.join(_KEYS)}")
    m, n, k = (read_integer(values, key, 1) for key in _BLOCKS)
    counts: dict[str, Any] = {name: read_integer(values, key, 1) for key, name in _COUNTS.items() if key in values}
    options = {name: read_integer(values, name, 0) for name in OPTIONS if name in values}
    for key, name in _OTHERS.items():
        if key in values:
            options[name] = int(values[key]) if isinstance(values[key], bool) else read_integer(values, key, 0)
    return replace(Config(kind.template, m, n, k), **counts, options=tuple(options.items()))


def read_m(member: Member) -> int:
    """Return the M of a row."""
    if not _NUMBER.fullmatch(member.key) or int(member.key) > MAX_DIM:
        raise InputError(f'M must be a whole number from 1 to {MAX_DIM} in quotes, as in "{LADDER[2]}"')
    return int(member.key)


def row_of(config: Config, kind: Kind) -> dict[str, int]:
    """Return the row of a config, complete or not."""
    fields = _BLOCKS | _COUNTS
    row = {key: int(getattr(config, fields[key])) for key in kind.keys}
    row |= {name: config.option(name) for name in OPTIONS if name in dict(config.options)}
    if not config.is_generated and config.split_k > 1 and "SPLIT_K" in kind.more:
        row["SPLIT_K"] = config.split_k
    if not config.is_generated and config.option("swap_ab") and "SWAP_AB" in kind.more:
        row["SWAP_AB"] = True
    return row


def _rank(kind: Kind, key: str) -> int:
    """Return the place of a row among others; other members stay in front."""
    return 0 if key in kind.remarks else int(key)


def _means(now: Any, row: Any, kind: Kind) -> bool:
    """Return whether an existing row means the same."""
    try:
        return read_config(now, kind) == read_config(row, kind)
    except InputError:
        return False


def _checked_m(path: Path, member: Member) -> int:
    try:
        return read_m(member)
    except InputError as error:
        raise InputError(f"{path}: line {member.line}: {error}") from None


class ServerTables(ServerFormat, abstract=True):
    """Tables of one server, a JSON file for each subject, whose name says it."""

    suffixes = (".json",)
    kinds: ClassVar[Mapping[str, Kind]]  # by the word behind `dtype=` in a file's name
    shape: ClassVar[str]  # how a file's name says which block of B shares a scale
    blanks: ClassVar[re.Pattern[str]]  # what of a device's name a file's name has a `_` for
    device_words: ClassVar[Mapping[str, str]] = {}  # devices whose names have such a word are all called so

    @abstractmethod
    def _is_name(self, name: str) -> bool:
        """Say whether a file may have this name."""

    def recognises(self, path: Path, text: str) -> bool:
        """Say whether a file has the name of a table, and holds a JSON object, or nothing yet."""
        return self._is_name(path.name) and (not text or text.lstrip().startswith("{"))

    def can_express(self, config: Config) -> bool:
        """Say whether the server's kernel can be launched with a config."""
        return any(self._holds(config, kind) for kind in self.kinds.values())

    def _holds(self, config: Config, kind: Kind) -> bool:
        """Say whether a row of a kind holds all of a config, which is then one of the server's kernel."""
        row = row_of(config, kind)
        known = (config.is_generated or config.backend == self.backend) and all(row[key] for key in _BLOCKS)
        return known and read_config(row, kind) == replace(config, backend=DEFAULT_BACKEND)

    def _device(self, record: Record) -> str | Support:
        """Return the name of a result's device as in file names, or why no table can have the result."""
        if record.predicted:
            return Support("its time is a prediction, which no timer measured")
        name = self.blanks.sub("_", record.toolchain.get("device", ""))
        name = next((known for word, known in self.device_words.items() if word in name.split("_")), name)
        if not _DEVICE.fullmatch(name):
            return Support("it does not say on which device it was measured, which the name of a table has")
        return name

    def _changed(self, rows: Mapping[ServerTable, Mapping[int, Any]], before: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the changed tables, by name."""
        if before.get(""):
            raise InputError(f"{self.server} keeps a folder of such tables; name a folder")
        texts = {table.name: _merged(table, before.get(table.name, ""), values) for table, values in rows.items()}
        return {name: text for name, text in texts.items() if text != before.get(name, "")}


def read_rows(path: Path, text: str, kind: Kind, make: Callable[[int, Config | None], FormatRow | None]) -> ResultsFile:
    """Return the rows of a table, the damaged ones apart."""
    rows, faults, seen = list[FormatRow](), RowFaults(path), dict[str, int]()
    for number, member in enumerate(read_members(path, text), start=1):
        if member.key in kind.remarks:
            continue
        with faults.of_row(number, member.line, f"M {printable(member.key)!r}:"):
            if seen.setdefault(member.key, number) != number:
                raise InputError(f"repeats row {seen[member.key]}; keep one of them")
            row = make(read_m(member), read_config(member.value, kind))
            rows += [replace(row, line=member.line, number=number)] if row else []
    return faults.beside(rows)


def _merged(table: ServerTable, text: str, values: Mapping[int, Any]) -> str:
    """Return a table's text with these rows, and one for each other M of them and of the ladder.

    Such a row is the one of the nearest M, or what the server runs without a table.
    """
    path, kind = Path(table.name), table.kind
    members = read_members(path, text) if text else []
    config_members = [member for member in members if member.key not in kind.remarks]
    now = {_checked_m(path, member): member.value for member in config_members}
    if len(now) < len(config_members):
        raise InputError(f"{path} has an M twice; keep one of its rows")

    def nearest(m: int) -> Any:
        return now[min(now, key=lambda known: abs(known - m))] if now else kind.today(m, table.vendor)

    rows = {m: nearest(m) for m in {*kind.ladder, *values} - {*now}}
    writable = {m: row for m, row in values.items() if not isinstance(row, Support)}
    rows |= {m: row for m, row in writable.items() if m not in now or not _means(now[m], row, kind)}
    return with_members(text, members, {str(m): row for m, row in rows.items()}, partial(_rank, kind))
