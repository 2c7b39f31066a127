import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import raising
from tests.support.linear_layers import problem, record
from tests.support.nouns import Format, Groups, InputError, Patch, Problem, cases, each, matrices, refuses, registry
from tests.support.plugins import dropped
from tritongemm.formats import Defaults, FormatRow
from tritongemm.workloads import sizes
from tritongemm.workloads.m_spans import MOST_WANTED, MSpan, drop_small, group_spans
from tritongemm.workloads.sibling_layers import find_siblings, join_rows, saved_by_joining, saved_seconds


def test_options() -> None:
    assert sizes.from_options(16, 32, 64, Defaults.of("bf16", layout="TN", bias="n")) == [
        FormatRow(Problem(16, 32, 64, *matrices("bf16", layout="TN"), bias="n"), None, None, None)
    ]


def test_what_can_not_be_read(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "empty.yaml").write_text(" \n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "table.csv").write_text("a,b,c\n")
    (tmp_path / "words.txt").write_text("hello there\n")
    for name, complaint in {
        "absent.yaml": "there is no such file",
        "": "is a folder",
        "empty.yaml": "is empty; write one line a size",
        "binary.yaml": "is not text",
        "table.csv": "line 1 names no column M, N, K",
        "words.txt": r"is in no known format .*a line for each, such as - {M: 4096, N: 4096, K: 8192}",
    }.items():
        refuses(complaint, sizes.from_file, tmp_path / name, Defaults())
    (tmp_path / "sizes.yaml").touch()
    monkeypatch.setattr(os, "open", raising(PermissionError(13, "Permission denied")))
    refuses(r"sizes\.yaml can't be read: Permission denied", sizes.from_file, tmp_path / "sizes.yaml", Defaults())


def test_a_format_is_one_file(tmp_path: Path, monkeypatch: Patch) -> None:
    """The toy's file, dropped into formats/, is found, asked and used."""
    with dropped(Format, "format_toy", tmp_path, monkeypatch) as name:
        assert name in registry.names(Format)
        table = tmp_path / "table.csv"
        table.write_text("toy,M,N,K\na,4,5,6\nb,7,8,9\n")
        problems = [Problem(*size, *matrices("bf16")) for size in ((4, 5, 6), (7, 8, 9))]
        assert sizes.from_file(table, Defaults.of("bf16")) == [FormatRow(p, line=n) for n, p in enumerate(problems, 2)]


def test_a_format_whose_package_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Other files are read; for one that no format claims the error names what could not be asked."""
    (file := tmp_path / "toy_csv.py").write_text("import no_such_package\n")
    with dropped(Format, file, tmp_path, monkeypatch):
        (good := tmp_path / "sizes.yaml").write_text("- {M: 1, N: 2, K: 3}\n")
        (bad := tmp_path / "table.csv").write_text("toy,M,N,K\na,4,5,6\n")
        assert len(sizes.from_file(good, Defaults())) == 1
        with pytest.raises(InputError, match=r"no known format .*toy_csv needs a package that is missing: .*no_such"):
            sizes.from_file(bad, Defaults())


TILE = "M: 16, N: 16, K: 16, BLOCK_SIZE_M: {}, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16"


@each(("backend", "block_m", "stages"), [(", backend: torch", 0, 0), ("", 16, 2)])
def test_other_backends_tiles_and_older_tritons_stages(tmp_path: Path, backend: str, block_m: int, stages: int) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(f"- {{{TILE.format(block_m)}{backend}, num_stages: 0}}\n")
    (row,) = sizes.from_file(path, Defaults())
    assert row.config and (row.config.block_m, row.config.num_stages) == (block_m, stages)


WIDE = Problem(1, 6144, 4096, *matrices("bf16", layout="TN"))


def row(m: int, n: int = 6144, k: int = 4096, count: float = 1.0) -> FormatRow:
    return FormatRow(Problem(m, n, k, *matrices("bf16", layout="TN")), count=count)


def test_products_are_grouped_by_work_and_groups_spread_as_captured() -> None:
    rows = [row(16, count=100), row(512, count=2), row(7, n=1024), row(16, count=5), row(1, count=1000)]
    wide, narrow = group_spans(rows)
    assert (wide.problem, wide.low, wide.high, wide.wanted) == (WIDE, 1, 512, (1, 16, 512))
    assert (narrow.problem.n, narrow.low, narrow.high, narrow.wanted) == (1024, 1, 7, (7,))
    assert [(s.low, s.high, s.wanted) for s in group_spans(rows, (2, 100))] == [(2, 100, (16,)), (2, 100, (7,))]
    rows = [row(16, count=10), row(16, n=8, k=8, count=10), row(1, n=1024, count=10)]
    kept, small = drop_small(rows)
    assert kept == [rows[0], rows[2]]
    assert [(p.n, p.k) for p in small] == [(8, 8)] and 0 < min(small.values()) < 0.001
    assert drop_small(rows[1:2]) == (rows[1:2], {})
    few = Problem(8, 64, 32, groups=Groups(4, spread="captured", counts=(0, 8, 0, 0)))
    many = Problem(100, 64, 32, groups=Groups(4, spread="captured", counts=(10, 50, 20, 20)))
    rows = [FormatRow(many), FormatRow(few, count=5), FormatRow(Problem(16, 64, 32, groups=Groups(4, spread="skewed")))]
    (span,) = group_spans(rows)
    assert (span.low, span.high, span.captured) == (1, 100, (few, many))
    assert (span.at(8), span.at(100)) == (few, many)
    assert span.at(3).row_counts == (0, 3, 0, 0) and span.at(10).row_counts == (1, 5, 2, 2)
    assert span.at(200).row_counts == (20, 100, 40, 40)
    assert span.at(10).at(1) == span.problem  # which is what tables of a product are found by


def test_what_is_searched_is_measured_and_the_ladder_is_within_the_span() -> None:
    for low, high in ((1, 2048), (1, 1), (5, 5), (3, 777), (1, 8192)):
        span = MSpan(WIDE, low, high, tuple(range(max(low, high - 20), high + 1)))
        found, ladder = span.searched(), span.ladder()
        assert {low, high, *span.wanted[:MOST_WANTED]} <= set(found) <= set(ladder)
        assert set(span.wanted) <= set(ladder)
        assert ladder == sorted(set(ladder)) and low == ladder[0] and ladder[-1] == high
    assert {8, 16, 24, 32, 40, 48, 56, 64} <= set(MSpan(WIDE, 1, 64).ladder())


ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."


def layer_row(m: int, n: int, k: int, count: float, *callers: str, bias: str = "none") -> FormatRow:
    return FormatRow(problem(m, n, k, bias), count=count, operation="linear", callers=callers)


# As a capture of a Llama of two layers writes it: equal layers are one row.
LLAMA = [
    layer_row(16, 64, 64, 40, ATTENTION + "o_proj", ATTENTION + "q_proj"),
    layer_row(16, 16, 64, 40, ATTENTION + "k_proj", ATTENTION + "v_proj"),
    layer_row(16, 224, 64, 40, MLP + "gate_proj", MLP + "up_proj"),
    layer_row(16, 64, 224, 20, MLP + "down_proj"),
    layer_row(16, 1000, 64, 10, "lm_head"),
]


def test_siblings_are_of_one_module_joined_and_of_one_size() -> None:
    names = ["a.q_proj", "a.k_proj", "b.v_proj", "w3", "w1", "b.mlp.up_proj", "b.mlp.gate_proj", "b.gate_proj"]
    assert find_siblings(names) == [("w1", "w3"), ("b.mlp.gate_proj", "b.mlp.up_proj")]
    qkv, mlp = join_rows(LLAMA)
    assert (qkv.row.problem, qkv.row.count) == (problem(16, 96, 64), 20)
    assert qkv.row.callers == tuple(ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
    assert [p.n for p in qkv.parts] == [64, 16, 16]
    assert (mlp.row.problem, mlp.row.count, [p.n for p in mlp.parts]) == (problem(16, 448, 64), 20, [224, 224])
    assert join_rows([LLAMA[2], layer_row(16, 448, 64, 1, MLP + "gate_proj")]) == []


@cases(
    layer_row(17, 224, 64, 1, MLP + "gate_proj"),
    layer_row(16, 224, 96, 1, MLP + "gate_proj"),
    layer_row(16, 224, 64, 1, MLP + "gate_proj", bias="n"),
    layer_row(16, 224, 64, 1, MLP + "gate_proj", bias="m"),
    replace(
        LLAMA[2],
        problem=replace(LLAMA[2].problem, b=LLAMA[2].problem.b._replace(row_major=True)),
        callers=(MLP + "gate_proj",),
    ),
)
def test_unlike_rows_are_not_joined(changed: FormatRow, /) -> None:
    assert join_rows([changed, replace(LLAMA[2], callers=(MLP + "up_proj",))]) == []


def test_what_joining_saves_is_counted_where_it_is_faster() -> None:
    one, many = problem(1, 96, 64), problem(1000, 1000, 64)
    assert saved_seconds(one, 3e-6, [2e-6, 1.5e-6]) == pytest.approx(0.5e-6)
    assert saved_seconds(one, 3e-6, [2e-6, 1.01e-6]) == 0.0 == saved_seconds(one, 3e-6, [1e-6, 1e-6])
    assert saved_seconds(many, 3e-6, [9e-6]) == pytest.approx(3.4e-6), "columns of many rows are slower to read"
    records = {p: record(p) for p in (problem(16, n, 64) for n in (16, 64, 224, 448, 96))}
    joined = join_rows(LLAMA)
    qkv, mlp = (saved_seconds(j.row.problem, 2e-6, [2e-6] * len(j.parts)) for j in joined)
    assert 2.9e-6 < qkv < 3e-6 and 0.9e-6 < mlp < 1e-6
    assert saved_by_joining(joined, records) == pytest.approx(20 * (qkv + mlp))
    by_library = {**records, joined[0].row.problem: replace(records[joined[0].row.problem], winner="torch")}
    assert saved_by_joining(joined, by_library) == pytest.approx(20 * (qkv - 1e-6 + mlp))
    del records[joined[0].row.problem]
    assert saved_by_joining(joined, records) == pytest.approx(20 * mlp)
