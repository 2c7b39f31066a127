"""Layers of one input: which they are, the products that compute them together, and what that saves."""

from dataclasses import replace

import pytest

from tests.support.linear_layers import problem, record
from tests.support.tables import each
from tritongemm.core.format_row import FormatRow
from tritongemm.workloads.sibling_layers import find_siblings, join_rows, saved_by_joining, saved_seconds

ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."


def row(m: int, n: int, k: int, count: float, *callers: str, bias: str = "none") -> FormatRow:
    return FormatRow(problem(m, n, k, bias), count=count, operation="linear", callers=callers)


# As a capture of a Llama of two layers writes it: equal layers are one row.
LLAMA = [
    row(16, 64, 64, 40, ATTENTION + "o_proj", ATTENTION + "q_proj"),
    row(16, 16, 64, 40, ATTENTION + "k_proj", ATTENTION + "v_proj"),
    row(16, 224, 64, 40, MLP + "gate_proj", MLP + "up_proj"),
    row(16, 64, 224, 20, MLP + "down_proj"),
    row(16, 1000, 64, 10, "lm_head"),
]


def test_siblings_are_of_one_module() -> None:
    names = ["a.q_proj", "a.k_proj", "b.v_proj", "w3", "w1", "b.mlp.up_proj", "b.mlp.gate_proj", "b.gate_proj"]
    assert find_siblings(names) == [("w1", "w3"), ("b.mlp.gate_proj", "b.mlp.up_proj")]


def test_rows_of_siblings_are_joined_and_share_their_rows_calls() -> None:
    qkv, mlp = join_rows(LLAMA)
    assert (qkv.row.problem, qkv.row.count) == (problem(16, 96, 64), 20)
    assert qkv.row.callers == tuple(ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
    assert [p.n for p in qkv.parts] == [64, 16, 16]
    assert (mlp.row.problem, mlp.row.count, [p.n for p in mlp.parts]) == (problem(16, 448, 64), 20, [224, 224])


@each(
    "changed",
    [
        row(17, 224, 64, 1, MLP + "gate_proj"),
        row(16, 224, 96, 1, MLP + "gate_proj"),
        row(16, 224, 64, 1, MLP + "gate_proj", bias="n"),
        row(16, 224, 64, 1, MLP + "gate_proj", bias="m"),
        replace(
            LLAMA[2],
            problem=replace(LLAMA[2].problem, b=LLAMA[2].problem.b._replace(row_major=True)),
            callers=(MLP + "gate_proj",),
        ),
    ],
)
def test_unlike_rows_are_not_joined(changed: FormatRow) -> None:
    assert join_rows([changed, replace(LLAMA[2], callers=(MLP + "up_proj",))]) == []


def test_a_layer_of_two_sizes_is_not_joined() -> None:
    assert join_rows([LLAMA[2], row(16, 448, 64, 1, MLP + "gate_proj")]) == []


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
