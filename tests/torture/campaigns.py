"""Campaigns without a process: a file is damaged, or holds hostile values, and is read as the commands read it."""

import json
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import DATA
from tests.support.nouns import Artifact, ArtifactCache, Defaults, Record, Trial, results_format
from tests.support.stores import CONFIG, ONE, THREE, TWO, record, take, trial
from tests.torture import hostile
from tests.torture.damage import damaged
from tests.torture.outcome import Outcome, TortureFailure
from tritongemm.backends.asm import manifest
from tritongemm.core.errors import InputError, OutputError, TritonGemmError
from tritongemm.results.store import Store
from tritongemm.workloads import sizes

_PROBLEMS = (ONE, TWO, THREE)
_MOST_MESSAGE = 4000  # characters of a message that a person still reads


class Campaign(ABC):
    """One kind of trial, tried over and over with other random numbers."""

    name: str  # in the counts

    def prepare(self, folder: Path) -> None:  # noqa: B027 (some campaigns start from nothing)
        """Make what every try starts from, in a folder that stays; called once."""

    @abstractmethod
    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Try once, in an empty folder; a TortureFailure where it ended as it must not."""


def refused(error: TritonGemmError) -> Outcome:
    text = str(error)
    if not text.strip() or len(text) > _MOST_MESSAGE:
        raise TortureFailure(f"a message of {len(text)} characters: {text[:300]!r}") from error
    return Outcome.REFUSED


def _trials(number: int) -> list[Trial]:
    return [trial(number), trial(number + 10, status="timeout", samples=())]


class DamagedJournals(Campaign):
    """A journal is damaged between two runs; what the second writes must be what was measured."""

    name = "damaged journals"

    def prepare(self, folder: Path) -> None:
        """A journal with lines of every kind, of which some were merged."""
        path = folder / "out.yaml"
        with take(path) as store:
            for number, problem in enumerate(_PROBLEMS):
                store.add_trials(problem, _trials(number))
                store.add_record(record(problem))
        self._journal = store.journal.read_bytes()

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Damage it, open it, merge, measure again what is missing, and read everything back."""
        path, data = folder / "out.yaml", damaged(self._journal, rng)
        (folder / "out.yaml.journal").write_bytes(data)
        expected = {problem: record(problem) for problem in _PROBLEMS}
        try:
            with take(path) as store:
                lost = self._measure_again(store)
                store.merge(_PROBLEMS)
            with take(path) as store:
                found = {problem: store.record(problem) for problem in _PROBLEMS}
        except (OutputError, InputError) as error:
            return refused(error)
        others = [one for one in _records(path) if one not in expected.values()]
        if found != expected or others:
            raise TortureFailure(f"the results are not what was measured: {found} {others}")
        return Outcome.RECOVERED if lost else Outcome.HARMLESS

    def _measure_again(self, store: Store) -> int:
        """Do what a resumed run does, and check that nothing else is taken for measured; how much was lost."""
        lost = 0
        for number, problem in enumerate(_PROBLEMS):
            known, held = set(_trials(number)), set(store.trials(problem).values())
            if held - known:
                raise TortureFailure(f"trials that were not made: {held - known}")
            lost += len(known - held)
            if store.record(problem) is None:
                lost += 1
                store.add_record(record(problem))
        return lost


def _records(path: Path) -> list[Record]:
    return [row.record for row in sizes.from_file(path, Defaults()) if row.record is not None]


class DamagedFiles(Campaign):
    """A file is damaged and read; `texts` makes what it held before, one of several."""

    def __init__(
        self, name: str, file: str, texts: Callable[[], Sequence[bytes]], read: Callable[[Path], Outcome]
    ) -> None:
        self.name, self._file, self._make, self._read = name, file, texts, read

    def prepare(self, folder: Path) -> None:
        self._texts = self._make()

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        path = folder / self._file
        path.write_bytes(damaged(rng.choice(self._texts), rng))
        return self._read(path)


def _results() -> Sequence[bytes]:
    return [results_format().write([record(p, library_seconds=2e-5, library="torch") for p in _PROBLEMS]).encode()]


def _sizes() -> Sequence[bytes]:
    own = b"# three\n- {M: 16, N: 16, K: 16}\n- {M: 8, N: 16, K: 16}\n- {M: 5, N: 16, K: 16, rowMajorA: T}\n"
    return [own, (DATA / "tune_gemm_results.yaml").read_bytes()]


def _manifests() -> Sequence[bytes]:
    head = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
    symbol = "_ZN5aiter37bf16gemm_fp32bf16_tn_{}x64_pf3_splitkE"
    return [(head + "".join(f"{symbol.format(m)},kernel{m}.co,1,{m},64,3,0,1,128,1\n" for m in (32, 64))).encode()]


def _read_manifest(path: Path) -> Outcome:
    try:
        for row in manifest.read(path):
            if not row.path.is_relative_to(path.parent):
                raise TortureFailure(f"a manifest names {row.path}, outside its folder")
    except TritonGemmError as error:
        return refused(error)
    return Outcome.HARMLESS


def read_back(path: Path) -> Outcome:
    """Read a file, and where that works write its results and read those; a TortureFailure where they differ."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _records(path)
    except TritonGemmError as error:
        return refused(error)
    if not found:
        return Outcome.HARMLESS
    path.write_text(results_format().write(found), encoding="utf-8")
    again = _records(path)
    if again != found:
        raise TortureFailure(f"{found} was written and read as {again}")
    return Outcome.HARMLESS


class HostileRows(Campaign):
    """A row of sizes or results holds a value that it should not."""

    name = "hostile rows"

    def prepare(self, folder: Path) -> None:
        self._row: dict[str, Any] = yaml.safe_load(results_format().write([record(ONE)]))[0]

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        row = dict(self._row)
        keys = [*row, "batch", "groups", "order_b", "options", "NUM_SMS", "waves_per_eu", "library_us", "compute_units"]
        for _ in range(rng.randint(1, 3)):
            row[rng.choice(keys) if rng.random() < 0.95 else hostile.text(rng)] = hostile.value(rng)
        path = folder / "rows.yaml"
        try:
            path.write_bytes(self._text(row, rng).encode("utf-8", "surrogatepass"))
        except (UnicodeError, yaml.YAMLError):
            return Outcome.HARMLESS
        return read_back(path)

    @staticmethod
    def _text(row: dict[str, Any], rng: random.Random) -> str:
        text = json.dumps(row) if rng.random() < 0.5 else yaml.safe_dump(row, default_flow_style=True)
        return "# Tuned by tritongemm, schema 2: hostile\n- " + text.replace("\n", "\n  ") + "\n"


class DamagedCaches(Campaign):
    """An entry of the cache of compiled kernels is damaged; it is given back as it was, or not at all."""

    name = "damaged caches"
    _CODE = bytes(range(256)) * 8
    _DIGEST = "ab" * 32

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        cache = ArtifactCache(folder / "cache")
        built = Artifact(CONFIG, self._DIGEST, symbol="kernel", registers=32, threads=256, launch={})
        kept = cache.put(built, self._CODE, "kernel.hsaco")
        file = rng.choice(sorted(Path(kept.path).parent.iterdir()))
        file.write_bytes(damaged(file.read_bytes(), rng))
        outcome = Outcome.HARMLESS
        for _ in range(2):
            found = cache.get(self._DIGEST)
            if found is None:
                outcome = Outcome.RECOVERED
                kept = cache.put(built, self._CODE, "kernel.hsaco")
                continue
            if found.symbol != kept.symbol or Path(found.path).read_bytes() != self._CODE:
                raise TortureFailure(f"the cache gave back {found}, which was not stored")
        if cache.get(self._DIGEST) is None:
            raise TortureFailure("an entry that was stored again is not found")
        return outcome


IN_PROCESS: tuple[Campaign, ...] = (
    DamagedJournals(), DamagedFiles("damaged results", "out.yaml", _results, read_back), HostileRows(),
    DamagedFiles("damaged sizes", "sizes.yaml", _sizes, read_back),
    DamagedFiles("damaged manifests", "kernels.csv", _manifests, _read_manifest), DamagedCaches(),
)  # fmt: skip
