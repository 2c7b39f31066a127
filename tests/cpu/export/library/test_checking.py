from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from tests.support import libraries
from tests.support.libraries import UNITS
from tests.support.nouns import SUPPORTED, BuildPool, Config, LibraryBackend, Machine, Patch, Record, loader, registry
from tritongemm.build.cache import ArtifactCache
from tritongemm.export.library import building, checking
from tritongemm.export.library.checking import Checked, Claim
from tritongemm.export.library.entry import LibraryEntry
from tritongemm.system import settings

NOWHERE = Machine(loader.load_target("gfx942"), "", (), "", "")
HERE = Machine(replace(loader.load_target("sm90"), compute_units=UNITS), "", (0,), "H200", "")
SIZE = libraries.tuned(libraries.linear(16, 96, 160, "bf16"))
ALGORITHM = Config("heuristic", 64, 64, 32, options=(("index", 3), ("version", 130200)), backend="blaslt")


@pytest.fixture(scope="module")
def pool(session_cache: object) -> Iterator[BuildPool]:
    with closing(BuildPool(ArtifactCache(settings.cache_folder()), 1)) as made:
        yield made


@pytest.fixture(scope="module")
def entry(pool: BuildPool) -> LibraryEntry:
    (made,) = building.build([SIZE], NOWHERE).entries
    return made


def states(pool: BuildPool, *claims: Claim, here: Machine = NOWHERE) -> list[tuple[str, str]]:
    found: list[Checked] = checking.check(claims, here, pool)
    assert [one.claim for one in found] == list(claims)
    return [(one.state, one.reason) for one in found]


def test_the_same_code_object_holds_and_another_one_or_launch_has_moved(pool: BuildPool, entry: LibraryEntry) -> None:
    assert entry.kernel is not None
    recorded = Claim(replace(SIZE, code=entry.kernel.sha256))
    stored = Claim(entry.record, entry.kernel)
    assert states(pool, recorded, stored) == states(pool, recorded, stored, here=HERE) == [("holds", "")] * 2
    kernel, launches = entry.kernel, entry.kernel.launches
    older = replace(kernel, sha256="0" * 64, source="1" * 40)
    wider = replace(kernel, launches=replace(launches, launch=replace(launches.launch, grid=(7, 1, 1))))
    claims = [
        Claim(replace(SIZE, code="0" * 64)),
        Claim(replace(SIZE, code="0" * 64, toolchain={"triton": settings.version("triton")})),
        Claim(entry.record, older), Claim(entry.record, wider), Claim(SIZE), Claim(replace(SIZE, timer="model")),
        Claim(entry.record, kernel, "its code object is damaged"),
        Claim(replace(SIZE, config=replace(SIZE.config, block_m=24))), Claim(replace(SIZE, order="2x32")),
    ]  # fmt: skip
    found = states(pool, *claims)
    assert [state for state, _ in found] == [
        *("moved", "moved", "moved", "moved", "unknown", "unknown", "damaged", "fails", "fails")
    ]
    assert found[0][1] == f"triton 3.7.0 → {settings.version('triton')}"
    assert "the kernel's text" in found[1][1] and "launched otherwise" in found[3][1]
    assert "was not recorded" in found[4][1] and "power of two" in found[7][1]
    assert found[8][1].startswith("it states the order 2x32, and its kernel adds up in the order ")


def test_other_gpus_results_are_not_compiled(pool: BuildPool, entry: LibraryEntry, monkeypatch: Patch) -> None:
    """The text, the options and the compiler are the same, and the cache is empty."""
    others = Claim(replace(SIZE, target="gfx942")), Claim(replace(SIZE, compute_units=80))
    assert states(pool, *others, here=HERE) == [
        ("foreign", "for gfx942; this GPU is sm90"),
        ("foreign", f"for 80 compute units; this GPU has {UNITS}"),
    ]
    monkeypatch.setattr(pool.cache, "get", lambda digest: None)
    monkeypatch.setattr(pool, "stream", lambda jobs: iter([] if not list(jobs) else [1 / 0]))
    assert states(pool, Claim(entry.record, entry.kernel)) == [("holds", "")]


def test_libraries_hold_while_their_version_is_the_recorded_one(pool: BuildPool, monkeypatch: Patch) -> None:
    torch = settings.version("torch")

    def won(version: str) -> Record:
        return replace(SIZE, winner="torch", toolchain={"torch": version} if version else {})

    algorithm = Claim(replace(SIZE, winner="blaslt", config=ALGORITHM))
    assert states(pool, Claim(won(torch)), Claim(won("2.0.0")), Claim(won("")), algorithm) == [
        ("holds", ""),
        ("moved", f"torch 2.0.0 → {torch}"),
        ("unknown", "the version of torch was not recorded"),
        ("unchecked", "it needs a GPU: no CUDA or HIP driver with a device is here"),
    ]
    backend = registry.get(LibraryBackend, "blaslt")
    monkeypatch.setattr(backend, "available", lambda: SUPPORTED)
    for version, state in (("130200", ("holds", "")), ("130300", ("moved", "cublaslt 130200 → 130300"))):
        monkeypatch.setattr(backend, "version", lambda version=version: version)
        assert states(pool, algorithm, here=HERE) == [state]
