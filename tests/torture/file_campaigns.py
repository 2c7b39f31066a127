"""Campaigns without a process on files that travel: libraries, captured sizes, logs, other tools' formats, reports."""

import contextlib
import gzip
import io
import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from tests.support import call_logs, libraries, reports
from tests.support.nouns import Config, Defaults, Format, Record, load_target, matrices, registry
from tests.torture import hostile
from tests.torture.campaigns import Campaign, refused
from tests.torture.commands import Ended
from tests.torture.damage import damaged
from tests.torture.outcome import Outcome, TortureFailure
from tritongemm.campaigns.log_file import LogFile
from tritongemm.campaigns.workload import read_workload
from tritongemm.cli import convert, report
from tritongemm.core.errors import OutputError, TritonGemmError
from tritongemm.export.library.code_object import sealed
from tritongemm.export.library.storage import MANIFEST, open_library
from tritongemm.report.page import writing
from tritongemm.report.page.report_data import device_of
from tritongemm.workloads import sizes
from tritongemm.workloads.capturing.product import Product
from tritongemm.workloads.capturing.workload_file import Counted, WorkloadFile

# Products that no three changed digits make alike.
_SIZES = ((16, 128, 512), (48, 3844, 1024), (1777, 4096, 7168), (256, 992, 320))
_RECORDS = tuple(reports.result(reports.problem(*size), 1e-5 * (i + 1)) for i, size in enumerate(_SIZES))
_ALGORITHM = Config("Cijk_Alik_Bljk_BBS_BH_MT64x64x64_SN", 0, 0, 0, backend="blaslt",
                    options=(("index", 44), ("version", (100100 << 32) + 0xBF2C3184)))  # fmt: skip
_ALGORITHMS = tuple(
    replace(r, config=_ALGORITHM, winner="blaslt", target="gfx942", compute_units=304) for r in _RECORDS
)


def run(main: Callable[[Sequence[str]], int], *argv: str) -> Ended:
    """A command in this process; a TortureFailure where it ended in a way that no user should see."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = main(argv)
        except SystemExit as end:  # of a wrong option
            status = int(str(end.code))
    return Ended(argv, status, out.getvalue(), err.getvalue()).checked()


def _read(path: Path) -> list[Record]:
    """The results of a file that can be used; a TritonGemmError where it can't be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row.record for row in sizes.from_results(path, Defaults()).rows if row.record is not None]


class DamagedLibraries(Campaign):
    """A library is damaged; what it still gives out is what was written."""

    name = "damaged libraries"

    def prepare(self, folder: Path) -> None:
        """A library of three results as an archive and as a folder, and what it gives out."""
        self._base = folder
        records = [libraries.tuned(libraries.linear(32, 48, 64), m_from=1)]
        records += [libraries.tuned(libraries.linear(16, 48, 64)), libraries.tuned(libraries.linear(8, 16, 32))]
        entries = libraries.write(folder / "library.zip", *records)
        libraries.write(folder / "library", *records)
        self._entries = {entry.name: entry.to_json() for entry in entries}
        self._codes = {e.name: f"code of {e.record.problem.key}".encode() for e in entries}

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Damage the archive, or a file of the folder, or write values that its manifest must not hold."""
        path, is_sealed = folder / "library.zip", rng.random() < 0.3
        if is_sealed or rng.random() < 0.4:
            path = folder / "library"
            (path / "objects").mkdir(parents=True)
            for file in sorted((self._base / "library").rglob("*")):
                if file.is_file() and not file.name.startswith("."):
                    (path / file.relative_to(self._base / "library")).write_bytes(file.read_bytes())
            chosen = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
            if is_sealed:
                (path / MANIFEST).write_bytes(self._hostile(rng).encode("utf-8", "surrogatepass"))
            else:
                chosen.write_bytes(damaged(chosen.read_bytes(), rng))
        else:
            data = (self._base / "library.zip").read_bytes()
            path.write_bytes(self._misnamed(data, rng) if rng.random() < 0.1 else damaged(data, rng))
        try:
            library = open_library(path)
            faults = library.faults()
            for entry in library.entries:
                same = entry.to_json() == self._entries.get(entry.name)
                if not (same or is_sealed):
                    raise TortureFailure(f"a damaged library gives out {entry.to_json()}")
                kernel = entry.kernel
                if kernel and entry.name not in faults and library.read_code(kernel) not in self._codes.values():
                    raise TortureFailure(f"a damaged library gives out another code for {entry.name}")
        except TritonGemmError as error:
            return refused(error)
        return Outcome.RECOVERED if faults else Outcome.HARMLESS

    @staticmethod
    def _misnamed(data: bytes, rng: random.Random) -> bytes:
        """The archive with a member whose name is said to be UTF-8, and has another byte."""
        at = rng.choice([place for place in range(len(data)) if data.startswith(b"PK\1\2", place)])
        changed = bytearray(data)
        changed[at + 9] |= 8
        changed[at + 46 + rng.randrange(data[at + 28])] = rng.randrange(256)
        return bytes(changed)

    def _hostile(self, rng: random.Random) -> str:
        """A manifest with hostile values, and the seals that belong to them."""
        data = json.loads((self._base / "library" / MANIFEST).read_text(encoding="utf-8"))
        entry = rng.choice(data["entries"])
        place = entry
        while True:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.9:
                place = place[key]
                continue
            place[key] = hostile.value(rng)
            break
        entry.pop("sha256", None)
        data["entries"] = [sealed(one) if one is entry else one for one in data["entries"]]
        return json.dumps(data)


class DamagedCaptures(Campaign):
    """A file of captured sizes is damaged and added to; no other line changes, and calls add up."""

    name = "damaged captures"
    _CALLS, _MORE = 7, 5

    def prepare(self, folder: Path) -> None:
        """A file of three products, of which one can't be tuned, and a person's own row."""
        self._counted = [
            Counted(Product("linear", m, n, k, *matrices("bf16", layout="TN"), left_out=why), self._CALLS,
                    frozenset({"model.up"}))
            for (m, n, k), why in zip(_SIZES, ("", "", "no such dtype"), strict=False)
        ]  # fmt: skip
        path = folder / "shapes.yaml"
        WorkloadFile(path).add(self._counted, with_gradient=False)
        self._data = b"- {M: 5, N: 6, K: 7}  # mine\n" + path.read_bytes()

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        path, data = folder / "shapes.yaml", damaged(self._data, rng)
        path.write_bytes(data)
        more = [Counted(one.product, self._MORE, one.callers) for one in self._counted]
        try:
            WorkloadFile(path).add(more, with_gradient=False)
        except OutputError as error:
            if path.read_bytes() != data:
                raise TortureFailure("a file that was refused has changed") from error
            return refused(error)
        left, original = iter(path.read_bytes().splitlines()), set(self._data.splitlines())
        for line in data.splitlines():
            known = line in original and b'"count"' in line
            if not any(line.rsplit(b', "count"')[0] in one if b'"count"' in line else one == line for one in left):
                raise TortureFailure(f"a line is gone: {line[:300]!r}")
            grown = line.replace(b'"count": %d' % self._CALLS, b'"count": %d' % (self._CALLS + self._MORE))
            if known and grown not in path.read_bytes().splitlines():
                raise TortureFailure(f"calls did not add up: {line[:300]!r}")
        try:
            sizes.from_file(path, Defaults())
        except TritonGemmError as error:
            return refused(error)
        return Outcome.HARMLESS


class DamagedLogs(Campaign):
    """A log of what a job called is damaged; each line that is as it was counts."""

    name = "damaged logs"

    def prepare(self, folder: Path) -> None:
        """Lines of all forms, each of a product of its own."""
        forms: list[Callable[..., str]] = [partial(call_logs.line, form) for form in call_logs.FORMS]
        forms += [call_logs.trace, call_logs.hipblaslt_trace]
        self._lines = {1000 + 37 * i: forms[i % len(forms)](n=1000 + 37 * i).encode() for i in range(18)}
        self._target = load_target("gfx942")

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        data, path = b"".join(self._lines.values()), folder / "job.log"
        is_damaged_packed = rng.random() < 0.1
        if is_damaged_packed:
            path.write_bytes(damaged(gzip.compress(data, mtime=0), rng))
        else:
            data = damaged(data, rng)
            path.write_bytes(gzip.compress(data) if rng.random() < 0.2 else data)
        try:
            found = {p.problem.m: p.count for p in read_workload(LogFile(path), self._target).products if p.problem}
        except TritonGemmError as error:
            return refused(error)
        there = set(data.splitlines(keepends=True))
        lost = [n for n, line in self._lines.items() if line in there and not found.get(n)]
        if lost and not is_damaged_packed:
            raise TortureFailure(f"lines that are as they were do not count: {lost}")
        return Outcome.HARMLESS if len(found) == len(self._lines) else Outcome.RECOVERED


class DamagedConversions(Campaign):
    """Results are damaged and written in another tool's format, and such files are damaged and read."""

    name = "damaged conversions"

    def prepare(self, folder: Path) -> None:
        """Results of two kinds, and what they are in each format that can express them."""
        self._cases: list[tuple[tuple[Record, ...], Path, str, Path]] = []  # results, their file, a format, its file
        for records in (_RECORDS, _ALGORITHMS):
            source = reports.write_results(folder / f"{records[0].target}.yaml", list(records))
            for name in registry.names(Format):
                output = folder / f"{records[0].target}-{name}_tuned_gemm"
                if run(convert.main, str(source), "-o", str(output), "--to", name).status < 2 and output.is_file():
                    self._cases.append((records, source, name, output))
                    if not set(map(_key, _read(output))) <= set(map(_key, records)):
                        raise TortureFailure(f"other results are read of what was written as {name}")
        if len(self._cases) < 6:
            raise TortureFailure(f"results can be written in {[case[2] for case in self._cases]} only")

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Convert damaged results to a format, or a damaged file of a format to results."""
        records, ours, name, theirs = rng.choice(self._cases)
        source, output, is_ours = folder / "source", folder / "output", rng.random() < 0.6
        source.write_bytes(damaged((ours if is_ours else theirs).read_bytes(), rng))
        argv = (str(source), "-o", str(output), "--to", name if is_ours else "native_yaml")
        ended = run(convert.main, *argv)
        if ended.status == 2:
            return Outcome.REFUSED
        if not is_ours or name == "native_yaml":
            known, found = _read(source), _read(output)
            if sorted(map(_key, found)) != sorted(map(_key, known)):
                raise ended.failure(f"{known} became {found}")
        lines, there = ours.read_bytes().splitlines()[1:], source.read_bytes().splitlines()
        for record in (r for r, line in zip(records, lines, strict=True) if is_ours and line in there):
            lost = set(self._lines(theirs, record)) - set(output.read_bytes().splitlines())
            if lost and record.problem.key not in ended.err:
                raise ended.failure(f"a result that is as it was is neither written nor named: {lost}")
        return Outcome.RECOVERED if ended.status else Outcome.HARMLESS

    @staticmethod
    def _lines(path: Path, record: Record) -> list[bytes]:
        """The lines of a file that are of a result."""
        words = [str(size).encode() for size in (record.problem.m, record.problem.n, record.problem.k)]
        return [line for line in path.read_bytes().splitlines() if all(word in line for word in words)]


def _key(record: Record) -> tuple[str, str, str]:
    return record.problem.key, record.config.template, f"{record.seconds:.6g}"


class HostileReports(Campaign):
    """A report is drawn of damaged or hostile results; the page has a row for each, and no text of theirs as markup."""

    name = "hostile reports"
    _TEXTS = ("winner", "library", "verified", "timer", "target", "template")
    _NUMBERS = ("time(us)", "library_us", "spread", "error", "compute_units", "M_from")

    def prepare(self, folder: Path) -> None:
        path = reports.write_results(folder / "tuned.yaml", [*reports.table(4096, 4096), *_RECORDS, *_ALGORITHMS])
        self._text = path.read_text(encoding="utf-8")
        self._calls = "".join(f"- {{M: {m}, N: {n}, K: {k}, count: {m}}}\n" for m, n, k in _SIZES)
        path.write_text(self._text + "- {M: 0}\n", encoding="utf-8")
        self._tags = self._tags_of(self._draw(path)[1])

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Change the results, and perhaps how often they are called, and draw them."""
        path = folder / "tuned.yaml"
        if rng.random() < 0.3:
            path.write_bytes(damaged(self._text.encode(), rng))
        else:
            path.write_bytes(self._hostile(rng).encode("utf-8", "surrogatepass"))
        argv: tuple[str, ...] = ()
        if rng.random() < 0.3:
            (folder / "calls.yaml").write_bytes(damaged(self._calls.encode(), rng, most=1))
            argv = ("--workload", str(folder / "calls.yaml"))
        ended, page = self._draw(path, *argv)
        if ended.status == 2:
            return Outcome.REFUSED
        _, _, rest = page.partition('<script type="application/json" id="drawn">')
        json.loads(rest.partition("</script>")[0], parse_constant=lambda word: 1 / 0)
        if strange := self._tags_of(page) - self._tags:
            raise ended.failure(f"the page has tags that were not written here: {strange}")
        rows = page.partition('id="sizes-table"')[2].count("<tr>") - 1
        if rows != (known := len({(r.problem, device_of(r)) for r in _read(path)})):
            raise ended.failure(f"the page has {rows} rows of {known} results")
        return Outcome.RECOVERED if ended.status else Outcome.HARMLESS

    def _hostile(self, rng: random.Random) -> str:
        rows: list[dict[str, Any]] = yaml.safe_load(self._text)
        for _ in range(rng.randint(1, 4)):
            row = rng.choice(rows)
            if rng.random() < 0.6:
                row[rng.choice(self._TEXTS)] = rng.choice([reports.HOSTILE, hostile.text(rng)])
            elif rng.random() < 0.5:
                row["toolchain"] = {"device": hostile.text(rng), hostile.text(rng): hostile.text(rng)}
            else:
                row[rng.choice(self._NUMBERS)] = rng.choice([0.001, 1e10, 1, 1e-300, 1e300, hostile.value(rng)])
        return "# Tuned by tritongemm, schema 2: hostile\n" + "".join(f"- {json.dumps(row)}\n" for row in rows)

    @staticmethod
    def _draw(path: Path, *argv: str) -> tuple[Ended, str]:
        output = path.with_name("report.html")
        with mock.patch.object(writing, "_plotly", lambda: "0;"):  # which is five megabytes
            ended = run(report.main, str(path), "-o", str(output), *argv)
        return ended, output.read_text(encoding="utf-8") if ended.status < 2 else ""

    @staticmethod
    def _tags_of(page: str) -> frozenset[tuple[str, tuple[str, ...]]]:
        """The tags of a page with the names of their attributes."""
        found: set[tuple[str, tuple[str, ...]]] = set()
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attrs: found.add((tag, tuple(name for name, _ in attrs)))  # type: ignore[method-assign]
        parser.feed(page)
        return frozenset(found)


FILES: tuple[Campaign, ...] = (
    DamagedLibraries(), DamagedCaptures(), DamagedLogs(), DamagedConversions(), HostileReports(),
)  # fmt: skip
