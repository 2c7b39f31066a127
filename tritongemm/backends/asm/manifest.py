"""Manifests of assembly kernels: AITER's CSV, one kernel a row, with the code objects (or their sources) beside it.

Columns are known by these names, in any case and with or without underscores:

knl_name                symbol of the kernel
co_name, knl_file       its code object, or a source (``.s``, ``.ptx``) to assemble, in the manifest's folder or below
tileM, tileN            tile of C one workgroup makes
subK                    K of one step; no split may be shorter (64 where the column is absent)
splitK                  1 if the kernel can share the K loop of a tile
bPreshuffle             1 if B must have been shuffled for the kernel
bias                    1 if it can add one; pf: depth of its prefetch
layout                  ours: name of a parameter layout, or the parameters in order (`backends.asm.param_layout`)
grid                    ours: what x, y, z count, ``n,m,k`` (the default) or another order, ``mn``: tiles in one number
lds, threads            ours: dynamic LDS in bytes (0); threads of a workgroup (what the object says)

Others are kept as they are. ``//``, ``#``, `` ;`` and ``/* */`` begin comments, as AITER's code generator has it.
"""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from tritongemm.core.errors import InputError
from tritongemm.system.reading import decode

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LINE_COMMENT = re.compile(r"//.*|#.*| ;.*")
_SYNONYMS = {"knlfile": "coname", "kernelname": "knlname"}
_NUMBERS = {
    "tilem": 0,
    "tilen": 0,
    "subk": 64,
    "splitk": 0,
    "bpreshuffle": 0,
    "bias": 0,
    "pf": 0,
    "lds": 0,
    "threads": 0,
}
_MOST_DIGITS = 9
_SHOWN = 60  # characters of a value in a message
_SHOWN_COLUMNS = 1000  # characters of the names of columns
_REQUIRED = ("knlname", "coname", "tilem", "tilen")


@dataclass(frozen=True)
class KernelRow:
    """A row of a manifest: one kernel."""

    manifest: str  # file it comes from
    line: int  # line there
    symbol: str  # kernel symbol
    object: str  # name of the code object or source, relative to the manifest
    # tile_m, tile_n: tile of C one workgroup makes
    tile_m: int
    tile_n: int
    sub_k: int = 64  # K of one step
    split_k: bool = False  # it can share the K loop of a tile
    shuffled: bool = False  # B must be in the kernel's own order
    bias: bool = False  # it can add one
    prefetch: int = 0  # depth of its prefetch, 0 if not said
    # layout, grid: as written, "" if not said
    layout: str = ""
    grid: str = ""
    lds: int = 0  # dynamic LDS in bytes
    threads: int = 0  # of a workgroup, 0 if not said
    others: dict[str, str] = field(default_factory=dict, hash=False)  # remaining columns, by name as spelled

    @property
    def path(self) -> Path:
        """The code object or source."""
        return Path(self.manifest).parent / self.object

    @property
    def where(self) -> str:
        """File, line and kernel, for messages."""
        return f"{self.manifest}: line {self.line}: {self.symbol}"


def read(path: Path) -> list[KernelRow]:
    """Return the kernels of a manifest, which may have none; an InputError names file, line and column."""
    text = decode(path, "utf-8-sig")
    # Comments become empty lines, so that lines keep their numbers.
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    lines = [_LINE_COMMENT.sub("", line).strip() for line in text.splitlines()]
    filled = [(number, line) for number, line in enumerate(lines, 1) if line]
    if not filled:
        raise InputError(
            f"{path}: manifest is empty; its first line names the columns, e.g. knl_name,co_name,tileM,tileN"
        )
    spelled = _cells(path, *filled[0])
    columns = [_key(name) for name in spelled]
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        has = ", ".join(spelled)
        shown = has if len(has) <= _SHOWN_COLUMNS else f"{has[:_SHOWN_COLUMNS]}…"
        raise InputError(f"{path}: manifest has no column {', '.join(missing)}; it has {shown}")
    rows = [_row(path, number, line, columns, spelled) for number, line in filled[1:]]
    seen: dict[str, int] = {}
    for row in rows:
        if row.symbol in seen:
            raise InputError(f"{row.where}: the kernel is in line {seen[row.symbol]} already")
        seen[row.symbol] = row.line
    return rows


def whole_number(text: str) -> int | None:
    """Return the number that a cell holds, or None for anything else or more digits than a cell can have here."""
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None


def _key(name: str) -> str:
    plain = name.lower().replace("_", "")
    return _SYNONYMS.get(plain, plain)


def _cells(path: Path, number: int, line: str) -> list[str]:
    """Return the cells of a line, without the blanks around them."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise InputError(f"{path}: line {number} is no CSV: {error}") from None


def _row(path: Path, number: int, line: str, columns: list[str], spelled: list[str]) -> KernelRow:
    cells = _cells(path, number, line)
    if len(cells) != len(columns):
        raise InputError(f"{path}: line {number}: {len(cells)} values for {len(columns)} columns")
    values = dict(zip(columns, cells, strict=True))
    numbers = {}
    for name, default in _NUMBERS.items():
        cell = values.pop(name, "")
        value = whole_number(cell) if cell else default
        if value is None:
            raise InputError(
                f"{path}: line {number}: column {name} is {cell[:_SHOWN]!r}, not a whole number of at most "
                f"{_MOST_DIGITS} digits"
            )
        numbers[name] = value
    if not (numbers["tilem"] and numbers["tilen"] and numbers["subk"]):
        raise InputError(f"{path}: line {number}: a tile of {numbers['tilem']}x{numbers['tilen']} is none")
    symbol, name = values.pop("knlname"), values.pop("coname")
    if not symbol or not name:
        raise InputError(f"{path}: line {number}: a kernel needs a symbol and a code object")
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        column = spelled[columns.index("coname")]
        raise InputError(
            f"{path}: line {number}: column {column} is {name[:_SHOWN]!r}, which leads out of the manifest's folder"
        )
    layout, grid = values.pop("layout", ""), values.pop("grid", "")
    return KernelRow(
        manifest=str(path),
        line=number,
        symbol=symbol,
        object=name,
        tile_m=numbers["tilem"],
        tile_n=numbers["tilen"],
        sub_k=numbers["subk"],
        split_k=bool(numbers["splitk"]),
        shuffled=bool(numbers["bpreshuffle"]),
        bias=bool(numbers["bias"]),
        prefetch=numbers["pf"],
        layout=layout,
        grid=grid,
        lds=numbers["lds"],
        threads=numbers["threads"],
        others={s: values[c] for s, c in zip(spelled, columns, strict=True) if c in values},
    )
