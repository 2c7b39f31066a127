import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritongemm
from scripts.tables import packing
from tests.support import raising, shipped
from tests.support.formats import write_text
from tests.support.linear_layers import StandInKernel, problem, record, run_on_cpu, stand_in_device
from tests.support.nouns import SUPPORTED, OutputError, Patch, Problem, Record, Support, refuses
from tritongemm.serving import kernel_loading, loaded_tables, shipped_tables, stored_kernels
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher


@pytest.fixture
def said(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    monkeypatch.delenv("TRITONGEMM_CONFIG", raising=False)
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", Dispatcher())
    return shipped.ship(tmp_path, monkeypatch)


@pytest.fixture
def gpu(monkeypatch: Patch) -> SimpleNamespace:
    """A GPU that is the CPU: its memory's bandwidth, whether a graph is captured, and the M whose kernels it loaded."""
    here = SimpleNamespace(gbps=4800, capturing=False, loaded=list[int]())

    def load(device: Any, records: Sequence[Record], *_: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        here.loaded += [one.problem.m for one in records]
        kernels = {one.problem: StandInKernel() for one in records}
        return kernels, {one.problem: lambda m: StandInKernel() for one in records if one.m_from}

    run_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel_loading, "load_kernels", load)
    monkeypatch.setattr(kernel_loading, "open_device", lambda *_: stand_in_device(memory_gbps=here.gbps))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.capturing)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    return here


def test_rows_of_one_kernel_are_packed_as_one(said: list[str]) -> None:
    assert "4 of 7 rows" in said[1] and "7 held-out M: 1.0% slower" in said[1]
    for_h200 = shipped_tables.find("H200")
    assert for_h200.gpu == {"name": "NVIDIA H200", "target": "sm90", "compute_units": 132, "memory_gbps": 4917}
    assert for_h200.made == {"date": "2026-01-02", "driver": "580.1", "triton": "3.5.1", "torch": "2.11.0"}
    found = [row.record for row in for_h200.rows]
    assert [(r.m_from, r.problem.m, r.winner) for r in found] == [
        (1, 16, "triton"),
        (17, 32, "triton"),
        (33, 64, "torch"),
        (65, 96, "blaslt"),
    ]
    assert list(found[0].held_out) == ["0", "7", "15"] and found[0].toolchain["device"] == "NVIDIA H200"
    assert for_h200.rows[0].where == f"shipped tables of h200, 2026-01-02 ({shipped.LAYER})"


def test_a_table_is_packed_beside_those_of_other_products(said: list[str], tmp_path: Path, monkeypatch: Patch) -> None:
    before = [row.record for row in shipped_tables.find("H200").rows]
    shipped_tables._read.cache_clear()
    made = tmp_path / "more.yaml"
    more = [replace(one, problem=replace(one.problem, epilogue="silu_mul")) for one in shipped.rows("NVIDIA H200")]
    made.write_text('# made: {"date": "2026-01-03", "memory_gbps": 4917}\n' + write_text(*more), encoding="utf-8")
    assert "4 of 7 rows" in packing.pack(made, [], shipped_tables.FOLDER)
    found = shipped_tables.find("H200").rows
    assert [row.record for row in found[:4]] == before and len(found) == 8
    assert [row.where[24:34] for row in found[::4]] == ["2026-01-02", "2026-01-03"]


def test_the_packages_own_tables_are_small_and_without_gaps() -> None:
    assert 0 < sum(file.stat().st_size for file in shipped_tables.files()) < 2 << 20
    for tables in shipped_tables.read():
        assert {"date", "driver", "triton", "torch"} <= tables.made.keys() and tables.name in tables.gpu["name"].lower()
        ends = dict[Problem, int]()
        for row in tables.rows:
            record, product = row.record, row.record.problem.at(1)
            assert record.m_from == ends.get(product, 0) + 1 and not record.predicted and "TP " in row.where
            ends[product] = record.problem.m
        assert 8192 in ends.values() and set(ends.values()) <= {3, 512, 8192}


def test_calls_are_served_without_any_tuning(said: list[str], gpu: SimpleNamespace) -> None:
    """A product's kernels are loaded by its first call, which must not be while a graph is captured."""
    assert tritongemm.load("shipped") == 8 and not gpu.loaded
    x, w = torch.empty(5, shipped.K, dtype=torch.bfloat16), torch.empty(shipped.N, shipped.K, dtype=torch.bfloat16)
    default_dispatcher().device(-1)
    gpu.capturing = True
    assert tritongemm.explain(x, w).startswith("fallback: shipped tables load a product's kernels at its first call")
    gpu.capturing = False
    assert tritongemm.explain(x, w).startswith("range: ") and gpu.loaded == [16, 32, 96]
    assert tritongemm.explain(torch.empty(60, shipped.K, dtype=torch.bfloat16), w).startswith("library: ")
    assert gpu.loaded == [16, 32, 96]


def test_a_server_loads_the_kernels_of_its_weights(said: list[str], gpu: SimpleNamespace) -> None:
    tritongemm.load("shipped")
    w = torch.empty(shipped.N, shipped.K, dtype=torch.bfloat16)
    default_dispatcher().load_weights([w[1:], w.half(), torch.empty(shipped.N)], -1)
    assert not gpu.loaded
    default_dispatcher().load_weights([w], -1)
    assert gpu.loaded == [16, 32, 96]


def test_kernels_that_cant_be_loaded_leave_calls_to_pytorch(
    said: list[str], gpu: SimpleNamespace, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    tritongemm.load("shipped")
    default_dispatcher().device(-1)
    monkeypatch.setattr(kernel_loading, "load_kernels", raising(OutputError("the cache can't be written")))
    x, w = torch.empty(5, shipped.K, dtype=torch.bfloat16), torch.empty(shipped.N, shipped.K, dtype=torch.bfloat16)
    assert tritongemm.explain(x, w).startswith("fallback: ") and "the cache can't be written" in caplog.text


@pytest.mark.parametrize(("gbps", "serving", "reason"), [(4800, 4, 3352), (3350, 4, 4917), (2039, 0, 3352)])
def test_rows_serve_gpus_of_their_own_memory(
    gbps: int, serving: int, reason: int, said: list[str], gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.gbps = gbps
    tritongemm.load("shipped")
    with caplog.at_level(logging.INFO, "tritongemm"):
        assert default_dispatcher().device(-1) is not None
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"{serving} of 8 rows serve cpu (sm90, 132 compute units); " in line
    assert f"4 for memory of {reason} GB/s, not {gbps}" in line
    assert ("4 of those that serve were made by another Triton than " in line) is bool(serving)
    assert ("1 are algorithms of the library beside another torch than " in line) is bool(serving)


def test_a_table_of_ones_own_goes_first(said: list[str], gpu: SimpleNamespace) -> None:
    tritongemm.load("shipped")
    tritongemm.load([record(problem(96, shipped.N, shipped.K), m_from=1), record(problem(3, 32, 64))])
    device = default_dispatcher().device(-1)
    assert device is not None and not device.waiting and gpu.loaded == [3, 96]


def test_patch_uses_them_where_nothing_else_is_named(said: list[str], tmp_path: Path, monkeypatch: Patch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(shipped.K, shipped.N, bias=False), torch.nn.Linear(7, 9))
    assert "1 patched, but on no GPU" in f"{tritongemm.patch(model)}"
    assert [table.name for table in default_dispatcher()._tables] == ["shipped"]
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", Dispatcher())
    tritongemm.load([record(problem(3, 32, 64))])
    assert "0 of 2" in f"{tritongemm.patch(model)}" and len(default_dispatcher()._tables) == 1


def test_a_damaged_file_is_named(said: list[str]) -> None:
    file = shipped_tables.files()[1]
    shipped_tables._read.cache_clear()
    file.write_bytes(file.read_bytes()[:-9])
    refuses(r"h200\.json\.gz: the shipped tables are damaged .*; install", loaded_tables.read_table, "shipped")
    for one in shipped_tables.files():
        one.unlink()
    refuses(r"has no shipped tables in .*scripts/make_tables makes them", loaded_tables.read_table, "shipped")


def test_code_is_checked_once(tmp_path: Path, monkeypatch: Patch) -> None:
    """Of another Triton; what was wrong is checked again."""
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    answers = [Support("wrong"), SUPPORTED]
    monkeypatch.setattr(stored_kernels, "check_kernel", lambda *_: answers.pop(0))
    kernel: Any = SimpleNamespace(launch=SimpleNamespace(sha256="ab" * 32))
    here, row = stand_in_device(), record(problem(16, 32, 64))
    assert not stored_kernels.check_once(kernel, row, here)
    assert all(stored_kernels.check_once(kernel, row, here) for _ in range(3)) and not answers
