import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tritongemm
from tests.cpu.workloads.capturing.test_capture import Graph
from tests.support.nouns import Defaults, Patch, matrices, sizes
from tritongemm.workloads.capturing.group_spreads import GroupSpreads, Spread, range_of
from tritongemm.workloads.capturing.product import Product
from tritongemm.workloads.capturing.workload_file import Counted, WorkloadFile

GROUPS = 4
PRODUCT = Product("_grouped_mm", 16, 48, 32, *matrices("bf16", layout="TN"), groups=GROUPS)


def ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows).cumsum(0).int()


def note(spreads: GroupSpreads, *rows: int) -> None:
    spreads.note("_grouped_mm", (None, None, ends(*rows)), {}, range_of(GROUPS, sum(rows)))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line[2:]) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]


def test_shares_are_averaged_by_ranges_of_m() -> None:
    spreads = GroupSpreads()
    for counts in ((0, 8, 2, 0), (4, 0, 0, 12), (100, 0, 0, 0)):
        note(spreads, *counts)
    found = spreads.read()
    assert found.keys() == {(GROUPS, 4), (GROUPS, 7)}
    assert found[GROUPS, 4].shares == pytest.approx((0.775, 0.225, 0.0, 0.0))
    assert found[GROUPS, 4].samples == 2 and found[GROUPS, 7] == Spread((1.0, 0.0, 0.0, 0.0), 1)
    assert spreads.read() == found  # until they are written
    spreads.clear()
    assert spreads.read() == {}


def test_ids_of_experts_are_counted_and_few_calls_wait_to_be_read() -> None:
    spreads = GroupSpreads()
    ids = torch.tensor([[0, 3], [3, 1], [3, -1], [GROUPS, GROUPS + 7]])
    spreads.note("tritongemm.fused_moe", (None, None, None, None, ids), {}, range_of(GROUPS, 8))
    assert spreads.read()[GROUPS, 3].shares == pytest.approx((0.6, 0.2, 0.2, 0.0))
    spreads = GroupSpreads()
    for i in range(100):
        note(spreads, i + 1, 100, 0, 0)
    assert sum(spread.samples for spread in spreads.read().values()) <= 2 * 32
    spreads.clear()
    for wrong in ([9, 3, 4, 16], [0, 0, 0, 0], [-4, 0, 8, 16], [1, 2, 3, 900]):
        spreads.note("tritongemm.grouped_mm", (), {"offs": torch.tensor(wrong).int()}, (GROUPS, 4))
    for strange in (ends(1, 2), None, "offs"):
        spreads.note("tritongemm.grouped_mm", (None, None, strange), {}, (GROUPS, 4))
    spreads.note("tritongemm.grouped_mm", (), {}, (GROUPS, 4))
    assert spreads.read() == {}


def test_rows_of_several_processes_are_joined_by_their_calls(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    callers = frozenset({"experts"})
    for spread in (Spread((1.0, 0.0, 0.0, 0.0), 1), None, Spread((0.5, 0.5, 0.0, 0.0), 3)):
        WorkloadFile(path).add([Counted(PRODUCT, 2, callers, spread)], False)
    (row,) = rows_of(path)
    assert (row["group_shares"], row["group_samples"], row["count"]) == ([0.625, 0.375, 0.0, 0.0], 4, 6)
    (size,) = sizes.from_file(path, Defaults())
    assert size.problem.groups and sorted(size.problem.groups.counts) == [0, 0, 6, 10]
    path.write_text(path.read_text(encoding="utf-8").replace("[0.625, 0.375", "[x, 9"), encoding="utf-8")
    WorkloadFile(path).add([Counted(PRODUCT, 1, callers, Spread((0.25,) * 4, 1))], False)
    (row,) = rows_of(path)
    assert (row["group_shares"], row["group_samples"], row["count"]) == ([0.25] * 4, 1, 7)
    nested = path.read_text(encoding="utf-8").replace('["experts"]', "[" * 9999)
    path.write_text(nested.replace("}", "]}"), encoding="utf-8")
    WorkloadFile(path).add([Counted(PRODUCT, 1, callers, None)], False)
    (row,) = rows_of(path)
    assert (row["callers"], row["count"]) == (["experts"], 8), "nested deeper than Python reads"


def test_a_program_says_how_its_rows_are_spread(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    x, w1, w2 = torch.ones(5, 8), torch.ones(GROUPS, 12, 8), torch.ones(GROUPS, 8, 6)
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [0, 1]])
    with tritongemm.capture(path), torch.inference_mode():
        tritongemm.fused_moe(x, w1, w2, torch.ones(5, 2), ids)
        tritongemm.grouped_mm(torch.ones(16, 8), w1.mT, offs=ends(3, 0, 12, 1))
    found = {(row["operation"], row["N"]): row for row in rows_of(path)}
    assert len(found) == 3 and {row["group_samples"] for row in found.values()} == {2}  # they are of one range of M
    gate = found["tritongemm.fused_moe", 12]
    assert gate["group_shares"] == pytest.approx([0.625, 0.29375, 0.08125, 0.0]) and gate["M"] == 10
    problems = [row.problem for row in sizes.from_file(path, Defaults())]
    assert all(one.groups and sum(one.groups.counts) == one.m for one in problems)


def test_a_graph_keeps_what_it_writes_to(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph: Any = Graph()
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        w = torch.ones(GROUPS, 8, 12)
        tritongemm.grouped_mm(torch.ones(16, 8), w, ends(3, 0, 12, 1))
        graph.capture_begin()
        tritongemm.grouped_mm(torch.ones(16, 8), w, ends(3, 1, 11, 1))
        graph.capture_end()
    (memory,) = graph.tritongemm_writes_to
    assert memory.shape[-1] == GROUPS and memory.any()
