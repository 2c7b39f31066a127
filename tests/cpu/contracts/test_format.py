"""What every file format must do: each plug-in of formats/, and the toy that docs/plugins shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import DATA
from tests.support.plugins import dropped
from tests.support.stores import ONE, TWO, record
from tritongemm.core.errors import InputError
from tritongemm.formats import Defaults
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format

TOY = "format_toy"
NAMES = [*registry.names(Format), TOY]

# A file of each format as its tool or its user writes it, and one with a wrong row and what names it.
SAMPLES = {
    "aiter": ("a8w8_untuned_gemm.csv", "M,N,K\n1,2,3\n4,5,6\n"),
    "native_yaml": ("sizes.yaml", "# of mine\n- {M: 1, N: 2, K: 3, dtype_a: bf16}\n- {M: 4, N: 5, K: 6}\n"),
    "tune_gemm": ("sizes.yaml", "- {'M': 1, 'N': 2, 'K': 3}\n- {'M': 4, 'N': 5, 'K': 6}\n"),
    TOY: ("sizes.csv", "toy,M,N,K\na,1,2,3\nb,4,5,6\n"),
}
WRONG = {
    "aiter": ("M,N,K\n1, 2, 3\n\n4,x,6\n", r"row 2 \(line 4\) N must"),
    "native_yaml": ("- {M: 1, N: 2, K: 3, dtype_a: bf16}\n- {M: 4, N: 5, K: 0}\n", r"row 2 \(line 2\) K must"),
    "tune_gemm": ("- {M: 1, N: 2, K: 3}\n\n- {M: 4, N: x, K: 6}\n", r"row 2 \(line 3\) N must"),
    TOY: ("toy,M,N,K\na,1,2,3\nb,4,x,6\n", r"row 2 \(line 3\) M, N, K"),
}


@pytest.fixture(params=NAMES)
def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Format]:
    with dropped(Format, TOY, tmp_path, monkeypatch):
        yield registry.get(Format, request.param)


def test_every_format_has_samples() -> None:
    assert sorted(SAMPLES) == sorted(WRONG) == sorted(NAMES)


def test_it_is_described(plugin: Format) -> None:
    assert plugin.title and plugin.name in NAMES
    assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in plugin.suffixes)


def test_it_alone_claims_its_file(plugin: Format) -> None:
    """By its contents, whatever the file is called, where other formats have the same suffix."""
    name, text = SAMPLES[plugin.name]
    for path in (Path(name), Path("sizes")):
        assert [f.name for f in registry.every(Format) if f.recognises(path, text)] == [plugin.name]
    assert not plugin.recognises(Path("letter.txt"), "Dear reader,\n- so long\n")


def test_it_reads_rows_in_order(plugin: Format) -> None:
    name, text = SAMPLES[plugin.name]
    rows = plugin.read(Path(name), text, Defaults("int8", row_major_b=False))
    assert [(r.problem.m, r.problem.n, r.problem.k) for r in rows] == [(1, 2, 3), (4, 5, 6)]
    assert all(r.line and str(r.problem.k) in text.splitlines()[r.line - 1] for r in rows)
    assert rows[1].problem.dtype_a == "int8" and not rows[1].problem.row_major_b, "the caller's defaults"


def test_a_wrong_row_is_named(plugin: Format) -> None:
    text, complaint = WRONG[plugin.name]
    path = Path("folder") / SAMPLES[plugin.name][0]
    with pytest.raises(InputError, match=f"^{path}: {complaint}"):
        plugin.read(path, text, Defaults())


def test_what_it_writes_it_reads_back_equal(plugin: Format) -> None:
    given = [record(ONE), dataclasses.replace(record(TWO), tie=True, error=1e-3, compute_units=304)]
    if not plugin.can_write:
        with pytest.raises(InputError, match="can't hold our results"):
            plugin.write(given)
        return
    text = plugin.write(given)
    path = Path(f"out{plugin.suffixes[0]}")
    assert [f.name for f in registry.every(Format) if f.recognises(path, text)] == [plugin.name]
    assert [r.record for r in plugin.read(path, text, Defaults())] == given


def test_one_format_claims_each_file_of_the_field() -> None:
    paths = [*DATA.glob("tune_gemm*.yaml"), *DATA.glob("tune_gemm/*.yaml"), *DATA.glob("schema1/*.yaml")]
    assert len(paths) == 6
    for path in paths:
        claims = [f.name for f in registry.every(Format) if f.recognises(path, path.read_text())]
        assert len(claims) == 1, (path, claims)
