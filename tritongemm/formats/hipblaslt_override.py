"""Format: the file that HIPBLASLT_TUNING_OVERRIDE_FILE names, solutions of hipBLASLt that go before its own choice.

A line that names the library's build, then two lines a product: the columns and their values. Sizes are column-major:
m is our N, n our M, and a is our B. hipblaslt-bench writes such a file with more columns where HIPBLASLT_TUNING_FILE
names it; those of the key and the solution count.

    Git Version: bf2c3184
        transA,transB,batch_count,m,n,k,a_type,b_type,c_type,compute_type,solution_index
        T,N,1,6144,16,4096,bf16_r,bf16_r,bf16_r,f32_r,56073

The key has neither a bias nor scales nor strides: a row is for every call of its sizes and types. A number is one of a
build and a GPU; hipBLASLt drops the file where the first line is not its own revision.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, NamedKernel, ResultsFile, Translation
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._column_major import LIBRARY, LIBRARY_TYPES, ColumnMajor, column_major, winning_solution
from tritongemm.formats._rows import FULL_FLOAT32, KeptError, RowFaults
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, WritableFormat
from tritongemm.system.printable import printable

_VERSION = "Git Version: "
_KEY = ("transA", "transB", "batch_count", "m", "n", "k", "a_type", "b_type", "c_type", "compute_type")
_INDEX = ("solution_index", "soulution_index")  # hipblaslt-bench has written both
_NAMES = ("solution_name", "kernel_name")
_TYPES = {theirs: ours for theirs, ours in LIBRARY_TYPES.items() if DTYPES[ours].packed == 1}
_TYPE_OF = {ours: theirs for theirs, ours in _TYPES.items()}
_SUMS = ("f32_r", "i32_r")
_INTEGER = re.compile(r"[0-9]{1,10}", re.ASCII)
_UNREAD = f"the file does not begin with {_VERSION!r} and a build, so that hipBLASLt drops it; begin another one"
_REVISION_DIGITS = 8  # digits of the library's revision in the version of a config


@dataclass(frozen=True)
class _Pair:
    """The two lines of a product."""

    number: int  # its place in the file, from 1
    line: int  # of the values, from 1
    values: Mapping[str, str]  # by column; fewer or more than columns where it is damaged
    fault: str = ""  # why it is; "" where it is not


class HipblasltOverride(WritableFormat):
    """hipBLASLt's file of solutions that go before its own choice."""

    title = "hipBLASLt's override file of tuned solutions"
    suffixes = (".txt",)

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether its first lines are the library's build, or the columns of a product."""
        first = next((line for line in text.split("\n") if line.strip()), "")
        return first.startswith(_VERSION) or _is_head(first)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a size for each product, with its solution where the file names it."""
        rows, faults = dict[Problem, FormatRow](), RowFaults(path)
        for pair in _pairs(text):
            with faults.of_row(pair.number, pair.line):
                problem = _product(pair).problem({})
                if problem in rows:
                    raise InputError(f"repeats row {rows[problem].number}; hipBLASLt may take either: keep one of them")
                rows[problem] = FormatRow(problem, _config(pair), line=pair.line, number=pair.number)
        return faults.beside(rows.values())

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return a file with the solutions that won; rows of other products stay byte for byte."""
        text = before.get("", "")
        if text.strip() and not self.recognises(Path(), text):
            raise InputError(f"the file that is there is not {self.title}; choose another file with -o")
        revision, written, omitted = _revision(text), dict[ColumnMajor, int](), list[tuple[Record, str]]()
        first: Record | None = None
        for record in records:
            found = Support(_UNREAD) if text.strip() and not revision else _row_of(record, revision)
            if isinstance(found, Support):
                reason = found.reason
            elif first is not None and (record.target, record.compute_units) != (first.target, first.compute_units):
                reason = f"a file is of one device, and this one is of {first.target}"
            elif found[0] in written:
                reason = "a row of its sizes and types is written, and a row holds neither bias nor scales"
            else:
                first, revision = first or record, revision or found[2]
                written[found[0]] = found[1]
                continue
            omitted.append((record, reason))
        return Translation({"": _with_rows(text, written, revision)} if written else {}, len(written), tuple(omitted))


def _is_head(line: str) -> bool:
    names = line.strip().split(",")
    return names[0] == _KEY[0] and set(_KEY) <= set(names) and any(name in names for name in _INDEX)


def _pairs(text: str) -> Iterator[_Pair]:
    """Yield the products of a file."""
    head: list[str] | None = None
    number = 0
    for place, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith(_VERSION):
            continue
        if stripped.startswith(_KEY[0] + ","):
            head = stripped.split(",")
            continue
        number += 1
        cells = stripped.split(",")
        if head is None or not _is_head(",".join(head)):
            yield _Pair(number, place, {}, f"has no line of columns before it, such as {','.join(_KEY)},{_INDEX[0]}")
        elif len(cells) != len(head):
            yield _Pair(number, place, {}, f"has {len(cells)} values for {len(head)} columns; it may be cut")
        else:
            yield _Pair(number, place, dict(zip(head, cells, strict=True)))


def _product(pair: _Pair) -> ColumnMajor:
    """Return the product of a row."""
    if pair.fault:
        raise InputError(pair.fault)
    values = {name: value.strip() for name, value in pair.values.items()}
    for name in ("transA", "transB"):
        if values[name] not in ("N", "T"):
            raise InputError(f"{name} must be N or T, not {printable(repr(values[name]), 40)}")
    for name in ("batch_count", "m", "n", "k", *(name for name in _INDEX if name in values)):
        if not _INTEGER.fullmatch(values[name]):
            raise InputError(f"{name} must be a whole number, not {printable(repr(values[name]), 40)}")
    types = [values[name] for name in ("a_type", "b_type", "c_type")]
    unknown = [one for one in types if one not in _TYPES]
    compute = values["compute_type"].removeprefix("c_")
    if unknown or compute not in _SUMS:
        raise KeptError(f"its types {printable(', '.join([*types, compute]), 80)} are none that are tuned here")
    if "f32_r" in types[:2]:
        raise KeptError(FULL_FLOAT32)
    m, n, batch, k = (int(values[name]) for name in ("m", "n", "batch_count", "k"))
    a, b, c = (_TYPES[one] for one in types)
    return ColumnMajor(values["transA"] + values["transB"], m, n, batch, k, a, b, c)


def _config(pair: _Pair) -> Config | None:
    """Return the solution of a row by its name; a number alone means another one in another build."""
    name = next((pair.values[column].strip() for column in _NAMES if pair.values.get(column)), "")
    index = next(int(pair.values[column]) for column in _INDEX if column in pair.values)
    kernel = NamedKernel(LIBRARY, name, index)
    return registry.get(Backend, registry.resolve(Backend, LIBRARY)).config_of(kernel) if name else None


def _revision(text: str) -> str:
    """Return the build in a file's first line; "" where there is none."""
    first = text.split("\n", 1)[0].strip()
    return first.removeprefix(_VERSION).strip() if first.startswith(_VERSION) else ""


def _row_of(record: Record, revision: str) -> tuple[ColumnMajor, int, str] | Support:
    """Return the product of a result, its solution's number and its build, or why it can't be written."""
    kernel, product = winning_solution(record), column_major(record.problem)
    if isinstance(kernel, Support):
        return kernel
    if isinstance(product, Support):
        return product
    if "fp32" in (product.a, product.b) or any(one not in _TYPE_OF for one in (product.a, product.b, product.c)):
        return Support(f"rows with sums in {' or '.join(_SUMS)} are of no products of {record.problem.dtypes}")
    version = record.config.option("version")
    if not version or kernel.index < 1:
        return Support("its solution has no number of a known build; tune it anew with this hipBLASLt")
    own = f"{version & 0xFFFFFFFF:0{_REVISION_DIGITS}x}"
    if revision and not _is_revision(revision, own):
        return Support(f"the file is of build {printable(revision, 40)} of hipBLASLt, the result of {own}")
    return product, kernel.index, own


def _is_revision(revision: str, own: str) -> bool:
    """Return whether a build is the one whose first digits are in the version of a config."""
    digits = "".join(c for c in revision[:_REVISION_DIGITS] if c in "0123456789abcdef")
    return bool(digits) and digits.zfill(_REVISION_DIGITS) == own


def _with_rows(text: str, written: Mapping[ColumnMajor, int], revision: str) -> str:
    """Return a file's text with these rows, in the place of other rows of the same products."""
    lines = text.split("\n") if text else []
    same = set[ColumnMajor]()
    for pair in reversed(list(_pairs(text))):
        try:
            product = _product(pair)
        except (InputError, KeptError):
            continue
        if product in written and product not in same and _index(pair) == written[product]:
            same.add(product)
        elif product in written:
            del lines[pair.line - 1]
            behind = lines[pair.line - 1].strip() if pair.line - 1 < len(lines) else ""
            if _is_head(lines[pair.line - 2]) and (not behind or _is_head(behind)):
                del lines[pair.line - 2]  # its own columns
    added = [line for product, index in written.items() if product not in same for line in _lines_of(product, index)]
    if lines and not lines[-1].strip():
        lines.pop()
    head = [] if _revision(text) else [f"{_VERSION}{revision}"]
    return "\n".join([*head, *lines, *added]) + "\n"


def _index(pair: _Pair) -> int:
    return next(int(pair.values[column]) for column in _INDEX if column in pair.values)


def _lines_of(product: ColumnMajor, index: int) -> tuple[str, str]:
    """Return the two lines of a product."""
    types = ",".join(_TYPE_OF[one] for one in (product.a, product.b, product.c))
    sums = "i32_r" if product.a == "int8" else "f32_r"
    transposes = ",".join(product.transposes)
    sizes = f"{product.batch},{product.m},{product.n},{product.k}"
    return f"    {','.join((*_KEY, _INDEX[0]))}", f"    {transposes},{sizes},{types},{sums},{index}"
