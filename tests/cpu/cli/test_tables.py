"""Which tables over M a workload asks for."""

from __future__ import annotations

import io

from rich.console import Console

from tests.support.linear_layers import problem
from tritongemm.cli import options, tables
from tritongemm.core.format_row import FormatRow
from tritongemm.report.console import Reporter

ROWS = [
    FormatRow(problem(16, n, 64), count=8, callers=(f"model.layers.*.mlp.{name}",))
    for n, name in ((96, "gate_proj"), (112, "up_proj"), (64, "down_proj"))
]


def read(*more: str) -> tuple[list[int], str]:
    text = io.StringIO()
    reporter = Reporter(console=Console(file=text, width=200, highlight=False))
    args = options.parse(["--workload", "shapes.yaml", *more])
    return [span.problem.n for span in tables.read_spans(ROWS, args, reporter)], text.getvalue()


def test_layers_of_one_input_have_a_table_of_their_joined_product() -> None:
    found, said = read()
    assert found == [96, 112, 64, 208]
    assert "joined: N 208, K 64, bf16 TN: model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj" in said
    found, said = read("--no_join")
    assert found == [96, 112, 64] and said == ""
