import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.cpu.workloads.capturing.test_group_spreads import rows_of

pytestmark = pytest.mark.usefixtures("gpu_machine")
GROUPS, M = 4, 64
ONE, EVEN, OTHER = ([M] * GROUPS, [16, 32, 48, 64], [0, 1, 2, 64])  # ends of groups


@contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_calls_and_graphs_say_how_rows_are_spread(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    a = torch.randn(M, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(GROUPS, 256, 128, device="cuda", dtype=torch.bfloat16)
    one, even, other = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in (ONE, EVEN, OTHER))
    offs, graph = one.clone(), torch.cuda.CUDAGraph()
    with tritongemm.capture(path):
        tritongemm.grouped_mm(a, w.mT, offs)
        torch.cuda.synchronize()
        with no_waiting():
            tritongemm.grouped_mm(a, w.mT, offs)
        with torch.cuda.graph(graph):
            tritongemm.grouped_mm(a, w.mT, offs)
        with no_waiting():
            offs.copy_(even)
            graph.replay()
    (row,) = rows_of(path)
    assert row["groups"] == GROUPS and row["group_samples"] >= 3 and sum(row["group_shares"]) == pytest.approx(1)
    assert row["group_shares"][0] > 0.5 and row["group_shares"][-1] > 0.05  # of the calls, and of the graph
    gc.collect()
    offs.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    (memory,) = graph.tritongemm_writes_to
    assert (memory == other.cpu()).all(-1).any()


def test_a_mixture_captures_it_too(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    w1 = torch.randn(GROUPS, 256, 128, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(GROUPS, 128, 128, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([[0, 3]] * 24 + [[0, GROUPS]] * 8, device="cuda")  # the last is of another rank
    given = (x, w1, w2, torch.rand(32, 2, device="cuda"), ids)
    with tritongemm.capture(path):
        tritongemm.fused_moe(*given)
        torch.cuda.synchronize()
        with no_waiting():
            tritongemm.fused_moe(*given)
    rows = rows_of(path)
    assert {row["N"] for row in rows} == {256, 128}
    for row in rows:
        assert row["group_shares"] == pytest.approx([32 / 56, 24 / 56, 0, 0], abs=1e-6)
