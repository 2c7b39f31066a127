"""Shipped tables on a GPU: its memory's bandwidth, and a product's kernels, which its first call loads and checks."""

from pathlib import Path

import pytest
import torch

import tritongemm
from tests.gpu.here import graph_of, normal
from tests.support import shipped
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.machine import Machine
from tritongemm.serving.dispatcher import Dispatcher


def test_a_product_is_loaded_by_its_first_call(
    gpu_machine: Machine, dispatcher: Dispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gbps = machine.memory_gbps(gpu_machine)
    assert gbps == pytest.approx(gpu_machine.target.hbm_gbps, rel=0.05), "the driver's and the data sheet's"
    shipped.ship(tmp_path, monkeypatch, [(gpu_machine.product, gbps), ("NVIDIA Other", 100)], most=6)
    x, w = normal(5, shipped.K), normal(shipped.N, shipped.K)
    report = f"{tritongemm.load('shipped')}"
    assert report.startswith("3 of 6 rows serve cuda:0") and report.endswith(f"3 for memory of 100 GB/s, not {gbps}")
    device = dispatcher.device(0)
    assert device is not None and device.waiting and not device.loaded_ranges
    torch.nn.functional.linear(x, w)  # the library starts before the capture
    graph, captured = graph_of(tritongemm.mm, x, w)
    assert device.waiting, "nothing is loaded while a graph is captured"
    graph.replay()
    served = tritongemm.mm(x, w)
    expected = (x.double() @ w.double().T).bfloat16()
    for result in (captured, served):
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.1)
    assert not device.waiting and tritongemm.explain(x, w).startswith("range: ")
    assert tritongemm.explain(x.repeat(12, 1), w).startswith("library: ")
