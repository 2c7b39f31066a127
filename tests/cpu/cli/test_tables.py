"""Which tables over M a workload asks for."""

from dataclasses import replace

import pytest

from tests.support.linear_layers import problem
from tritongemm.cli import options, tune
from tritongemm.core.format_row import FormatRow
from tritongemm.report.console import Reporter
from tritongemm.tune import requested_rows

ROWS = [
    FormatRow(problem(16, n, 64), count=8, callers=(f"model.layers.*.mlp.{name}",))
    for n, name in ((96, "gate_proj"), (112, "up_proj"), (64, "down_proj"))
]


def read(*more: str, rows: list[FormatRow] = ROWS) -> list[tuple[int, int]]:
    request = tune.read_request(options.parse(["--workload", "shapes.yaml", *more]))
    return [(span.problem.n, span.high) for span in requested_rows.read_spans(rows, request.sizes, Reporter().say)]


def test_layers_of_one_input_have_a_table_of_their_joined_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert read() == [(96, 16), (112, 16), (64, 16), (208, 16)]
    layers = "model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj"
    assert f"joined: N 208, K 64, bf16 TN, M up to 16: {layers}" in str(capsys.readouterr())
    assert read("--no_join") == [(96, 16), (112, 16), (64, 16)]
    assert read("--m_range", "1-30000")[-1] == (208, 8 * 2**20 // 416)


def test_a_joined_product_has_one_table_and_layers_that_fill_a_gpu_none() -> None:
    assert read(rows=[*ROWS, FormatRow(problem(16, 208, 64), count=8)]) == [(96, 16), (112, 16), (64, 16), (208, 16)]
    wide = [replace(row, problem=replace(row.problem, k=400_000)) for row in ROWS]
    assert read(rows=wide) == [(96, 16), (112, 16), (64, 16)]
