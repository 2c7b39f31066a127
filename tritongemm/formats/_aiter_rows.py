"""Converts the cells of AITER's CSVs to and from problems, configs and results.

M counts tokens and N output features; A is in rows and B in columns (TN), as a linear layer has them. A bias is one
along N. Splits are literal numbers in some families and exponents of two in others. Rows of another tool's or AITER's
own kernels are sizes here: what their kernels are is kept in the file alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, NamedKernel
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.values import MOST, MOST_OF_OPTION, SECONDS
from tritongemm.formats._aiter_families import FAMILIES, OTHER_NAMES, CsvFamily
from tritongemm.formats._aiter_table import CsvLine
from tritongemm.formats._rows import make_problem
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend
from tritongemm.system.printable import printable

TIMER = "aiter"
TARGETS = "gfx"  # names of the GPUs that AITER runs on begin so
_GFX_OF_UNITS = {80: "gfx942", 304: "gfx942", 256: "gfx950"}  # in files from before the column gfx
_FNUZ = ("gfx942",)
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}
_MOST_EXPONENT = 16
_ONE_SCALE = "tensor"  # the granularity of one scale factor for an operand
_SHOWN = 60
A_DTYPE = "torch.bfloat16"
_KEPT = "aiter"  # name of the note that our results keep of a row: it is of the kernel that it names alone
_AFTER_SIZES = tuple(f.name for f in fields(Problem))[3:]


class CellReader:
    """Reads the rows of one file."""

    def __init__(self, family: CsvFamily, defaults: Defaults) -> None:
        self._family, self._defaults = family, defaults
        self._ignored = {key for other in FAMILIES for key in other.keys}.difference(family.keys)
        self._kinds: dict[tuple[object, ...], tuple[Any, ...]] = {}  # a problem's fields after its sizes
        self._backends: dict[str, Backend | None] = {}

    def read(self, line: CsvLine, where: str) -> FormatRow:
        """Return the row of a line."""
        if line.cells is None:
            raise InputError(f"{where} {line.fault}")
        cells = Cells({name: cell for name, cell in line.cells.items() if name not in self._ignored}, where)
        target, units = device(line.cells)
        problem = self._problem(cells, target)
        config = self._config(cells, target)
        record = None if config is None else read_record(cells.text("us"), problem, config, target, units)
        if record is not None and (kept := _kept(cells)):
            record = replace(record, notes={_KEPT: kept})
        name = "" if config else cells.text("kernelName")
        which = cells.text("libtype")
        foreign = f"AITER's own kernel ({printable(f'libtype {which}' if which else name, _SHOWN)})" if name else ""
        return FormatRow(problem, config, record, line.number, line.row, target, units, foreign=foreign, optional=True)

    def _problem(self, cells: Cells, target: str) -> Problem:
        m, n, k = (cells.integer(name, 1) for name in "MNK")
        encoding, family = encoding_of(target, self._defaults), self._family
        if "dtype" in family.keys and not self._defaults.a.dtype:
            cells.require("dtype", A_DTYPE)
        dtype = cells.text("dtype") or cells.text("q_dtype_w") or self._defaults.a.dtype or family.dtype
        scaled, shuffled = cells.flag("scaleAB"), cells.flag("bpreshuffle")
        if scaled and (shuffled or not family.scaled):
            cells.fail("scaleAB is True: one scale for all of A and of B is known here with plain B of the family bf16")
        own_scales = self._defaults.scales if family.name == family.ours == self._defaults.family else ""
        usual = "bf16" if family.dtype or "q_dtype_w" in family.keys else ""
        given: dict[str, Any] = {
            "family": family.scaled if scaled else family.shuffled if family.shuffled and shuffled else family.ours,
            "dtype_a": dtype,
            "dtype_b": self._defaults.b.dtype,
            "dtype_c": cells.text("outdtype") or self._defaults.c.dtype or usual,
            "row_major_a": True,
            "row_major_b": False,
            "bias": ("n" if cells.flag("bias") else "none") if cells.text("bias") else self._defaults.bias,
            "batch": cells.integer("B", 1, 1),
            **({"scales": scales} if (scales := _ONE_SCALE if scaled else family.scales or own_scales) else {}),
        }
        kind = (*given.values(), encoding)
        try:
            if kind not in self._kinds:
                model = make_problem(Defaults(fp8_encoding=encoding, families=self._defaults.families), m, n, k, given)
                if scaled and not (model.a.type.bytes == 1 and _has_one_scale(model)):
                    raise InputError(f"scaleAB is True: one scale for all of A and of B can't be tuned here in {dtype}")
                self._kinds[kind] = tuple(getattr(model, name) for name in _AFTER_SIZES)
            return Problem(m, n, k, *self._kinds[kind])
        except InputError as error:
            cells.fail(f"can't be: {error}")

    def _config(self, cells: Cells, target: str) -> Config | None:
        """Return the row's config; None for a size, and for a kernel that only AITER has."""
        name = cells.text("kernelName")
        if target and not target.startswith(TARGETS):
            return own_config(name)
        library = cells.text("libtype") or ("asm" if name.startswith("_Z") else "")
        if not name or library not in self._family.runs:
            return None
        split = cells.integer("splitK", 0, 0)
        if self._family.log2_split:
            split = 1 << min(split, _MOST_EXPONENT)
        kernel = NamedKernel(library, name, cells.integer("solidx", 0, 0, MOST_OF_OPTION), max(1, split))
        if library not in self._backends:
            self._backends[library] = registry.get(Backend, registry.resolve(Backend, library))
        backend = self._backends[library]
        config = backend and backend.config_of(kernel)
        return config if config and _is_nameable(config) else None


class Cells:
    """The cells of one line, with complaints that name it."""

    def __init__(self, values: Mapping[str, str], where: str) -> None:
        self._values = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
        self._where = where

    def text(self, name: str) -> str:
        """Return a cell's text, "" where there is none."""
        return self._values.get(name, "")

    def integer(self, name: str, least: int, default: int | None = None, most: int = MOST) -> int:
        """Return a cell's whole number; `default` where it is empty."""
        text = self.text(name)
        if not text and default is not None:
            return default
        number = whole_number(text)
        if number is None or not least <= number <= most:
            self.fail(f"{name} must be a whole number from {least} to {most}, not {printable(text, _SHOWN)!r}")
        return number

    def flag(self, name: str) -> bool:
        """Return the flag in a cell of True or False."""
        text = self.text(name)
        if text.lower() not in _FLAGS:
            self.fail(f"{name} must be True or False, not {printable(text, _SHOWN)!r}")
        return _FLAGS[text.lower()]

    def require(self, name: str, example: str) -> None:
        """Refuse the row if a required cell is empty."""
        if not self.text(name):
            self.fail(f"{name} is empty; write a value such as {example}")

    def fail(self, complaint: str) -> NoReturn:
        """Refuse the row."""
        raise InputError(f"{self._where} {complaint}")


def whole_number(text: str) -> int | None:
    """Return the number that a cell holds, also as pandas writes it (``304.0``); None where it holds something else."""
    digits = text.removesuffix(".0")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= len(str(MOST_OF_OPTION)) else None


def device(cells: Mapping[str, str]) -> tuple[str, int]:
    """Return the target and the compute units that a row is for; "" and 0 for a row of sizes."""
    units = whole_number(cells.get("cu_num", "")) or 0
    units = units if units <= MOST else 0
    return cells.get("gfx") or _GFX_OF_UNITS.get(units, ""), units


def seconds_of(cells: Mapping[str, str]) -> Decimal | None:
    """Return the time of a row; None for placeholders, which have 0, and for invalid times."""
    text = next((cells[name] for name in ("us", "soltimes") if name in cells), "")
    try:
        seconds = Decimal(text).scaleb(-6)
    except InvalidOperation:
        return None
    return seconds if SECONDS.holds(float(seconds)) else None


def encoding_of(target: str, defaults: Defaults) -> str:
    """Return the meaning of ``fp8`` in a row of a target, "" for a row of sizes."""
    return defaults.fp8_encoding if not target else "fnuz" if target in _FNUZ else "fn"


def read_record(us: str, problem: Problem, config: Config, target: str, units: int) -> Record | None:
    """Return a row's result, where it has a time and names its device."""
    seconds = seconds_of({"us": us})
    if seconds is None or not target:
        return None
    return Record(
        problem=problem,
        target=target,
        config=config,
        winner=config.backend,
        seconds=float(seconds),
        spread=0.0,
        timer=TIMER,
        compute_units=units,
    )


def _kept(cells: Cells) -> dict[str, Any]:
    """Return AITER's own number of a row's kernel and the share of wrong elements that it found, if given.

    Cells that hold something else are passed over, as nothing here reads them.
    """
    number = whole_number(cells.text("kernelId"))
    if number is None and cells.text("libtype") != "hipblaslt":  # there it is the config's own
        number = whole_number(cells.text("solidx"))
    found = {"kernelId": number or None, "errRatio": _share(cells.text("errRatio")) or None}
    present = {name: value for name, value in found.items() if value is not None}
    return {"kernelName": cells.text("kernelName"), **present} if present else {}


def _share(value: object) -> float | None:
    """Return a number from 0 to 1, given as number or text; None for anything else."""
    try:
        share = float(value) if isinstance(value, (str, float)) else math.nan
    except (ValueError, OverflowError):
        return None
    return share if 0 <= share <= 1 else None


def kept_cells(record: Record, kernel: NamedKernel) -> dict[str, str]:
    """Return what a result keeps of a row of AITER's with this kernel, as its cells."""
    kept = record.notes.get(_KEPT)
    if not isinstance(kept, Mapping) or kept.get("kernelName") != kernel.name:
        return {}
    number, ratio = whole_number(str(kept.get("kernelId", ""))), _share(kept.get("errRatio"))
    cells = {"kernelId": number, "solidx": kernel.index or number, "errRatio": ratio}
    present = {name: str(value) for name, value in cells.items() if value is not None}
    return present | {other: present[name] for other, name in OTHER_NAMES.items() if name in present}


def own_config(name: str) -> Config | None:
    """Return the config of a row of a GPU that AITER does not run on, which has our name of a kernel."""
    try:
        config = Config.parse(name)
    except InputError:
        return None
    return config if config.backend in registry.names(Backend) else None


def _is_nameable(config: Config) -> bool:
    """Return whether a config's name has all of it."""
    try:
        return Config.parse(config.name) == config
    except InputError:
        return False


def is_of(problem: Problem, family: CsvFamily) -> bool:
    """Return whether a family of AITER's computes a problem."""
    if problem.epilogue != "none":
        return False
    if not family.ours or problem.groups or problem.shared or (problem.batch > 1) != ("B" in family.keys):
        return False
    if family.scaled and _has_one_scale(problem):
        return problem.b.order == PLAIN and problem.family == registry.family_of(family.scaled)[0].name
    if problem.scales != family.scales:
        return False
    known = (registry.family_of(name) for name in (family.ours, family.shuffled) if name)
    return any((found.name, typical.b.order) == (problem.family, problem.b.order) for found, typical in known)


def _has_one_scale(problem: Problem) -> bool:
    """Return whether all of A shares one scale factor, and all of B."""
    return all(s is not None and not s.rows and not s.depth for s in problem.scalings)


def result_cells(record: Record, family: CsvFamily, kernel: NamedKernel, seconds: float) -> dict[str, str]:
    """Return the cells of a result as AITER writes them."""
    p, us = record.problem, seconds * 1e6
    split = max(0, kernel.split_k.bit_length() - 1) if family.log2_split else kernel.split_k
    cells = {
        "gfx": record.target,
        "cu_num": str(record.compute_units),
        "B": str(p.batch),
        "M": str(p.m),
        "N": str(p.n),
        "K": str(p.k),
        "bias": str(p.bias == "n"),
        "dtype": f"torch.{p.a.type.torch}",
        "outdtype": f"torch.{p.c.type.torch}",
        "scaleAB": str(_has_one_scale(p)),
        "bpreshuffle": str(p.b.order != PLAIN),
        "q_dtype_w": f"torch.{p.b.type.torch}",
        "libtype": kernel.library,
        "solidx": str(kernel.index),
        "kernelId": str(kernel.index),
        "splitK": str(split),
        "us": str(round(us, 4)),
        "kernelName": kernel.name,
        "tflops": two_decimals(p.flops / us / 1e6),
        "bw": two_decimals(p.bytes / us / 1e3),
        "errRatio": "0.0",  # a result is kept only where nothing that counts is outside its tolerance
    }
    return cells | {other: cells[name] for other, name in OTHER_NAMES.items()}


def two_decimals(value: float) -> str:
    """Return a rate as AITER writes it; "" for one that is no number."""
    return str(round(value, 2)) if math.isfinite(value) else ""
