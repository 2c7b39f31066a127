import hashlib
import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.support.linear_layers import StandInKernel, name_table, problem, record, stand_in_kernels
from tests.support.nouns import Caplog, Dispatcher, Patch, Support, each, refuses, results_format
from tests.support.products import product
from tritongemm.serving import loaded_tables
from tritongemm.serving.loaded_tables import read_configured, read_table
from tritongemm.serving.record_table import RecordTable


def test_a_line_names_the_file_and_what_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    kinds = [
        record(problem(1, 32, 64), compute_units=132),
        record(problem(2, 32, 64), toolchain={"triton": "3.0.0", "device": "NVIDIA H100"}),
        record(problem(3, 32, 64), compute_units=78),
        record(problem(4, 32, 64), target="gfx942", compute_units=304),
        record(problem(5, 32, 64), target="gfx942", compute_units=304),
        record(problem(6, 32, 64), timer="model"),
        record(problem(7, 32, 64)),
        record(problem(8, 32, 64, bias="m")),
    ]
    file.write_text(results_format().write(kinds), encoding="utf-8")
    table = loaded_tables.read_table(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert table.digest == digest == loaded_tables.combined_digest([table])
    assert len(table.rows) == 7 and table.unserved == (kinds[7],)
    device = stand_in_kernels(RecordTable(table.records), {kinds[6].problem: Support("wrong")})
    line = loaded_tables.describe([table], device)
    assert line.startswith(f"{file} (sha256 {digest}): 2 of 8 rows serve cpu (sm90, 132 compute units); 2 for gfx942; ")
    said = loaded_tables.LoadReport(table, device)
    assert said == 7 and line.startswith(f"{file} (sha256 {digest}): {said};") and pickle.loads(pickle.dumps(said)) == 7
    for part in (
        "; 1 with a bias along M, which no call has",
        "; 1 for 78 compute units",
        "; 1 predicted, not measured",
        "; 1 refused when loaded",
    ):
        assert part in line
    assert "; 1 of those that serve were made by another Triton than " in line and "\n" not in line
    assert line.endswith("; 1 were timed on NVIDIA H100, not on this NVIDIA H200")
    other = loaded_tables.read_table(kinds[:1])
    assert other.name == "records" and len({digest, other.digest, loaded_tables.combined_digest([table, other])}) == 3


def test_loading_says_in_words_what_serves(without_gpu: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    a8w8 = product("a8w8", 5, 32, 64, "int8", layout="TT")
    rows = [record(problem(m, 32, 64), compute_units=132) for m in (1, 2)]
    activated = record(replace(product("dense", 5, 32, 64, "bf16", layout="TT"), bias="none", epilogue="silu"))
    said = Dispatcher().load([*rows, record(problem(3, 32, 64), timer="model"), record(a8w8), activated])
    assert said + 2 == 5 and f"{said}" == (
        "0 of 5 rows serve, as no GPU is here; 2 for sm90, 132 compute units; 1 predicted, not measured, for sm90; "
        "1 of layout TT with scales, which scaled_mm takes in TN (tune with -col_b); "
        "1 of layout TT with an epilogue, which linear_act takes in TN (tune with -col_b)"
    )


def test_it_is_logged_once_a_device(tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    name_table(tmp_path, monkeypatch, record(problem(16, 32, 64)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        "tritongemm.serving.kernel_loading.load_device",
        lambda _, records, *others: stand_in_kernels(records, {problem(16, 32, 64): StandInKernel()}),
    )
    dispatcher = Dispatcher()
    with caplog.at_level(logging.INFO, "tritongemm"):
        assert len(dispatcher.add_configured()) == 12 and dispatcher.weights == {(32, 64)} and not caplog.records
        for _ in range(3):
            dispatcher.device(0)
            dispatcher.add_configured()
    assert [r.getMessage() for r in caplog.records] == [
        loaded_tables.describe(dispatcher._tables, dispatcher._devices[0])
    ]


def test_without_a_file_nothing_is_said(monkeypatch: Patch, caplog: Caplog) -> None:
    monkeypatch.delenv("TRITONGEMM_CONFIG", raising=False)
    with caplog.at_level(logging.INFO, "tritongemm"):
        assert Dispatcher().add_configured() == ""
        loaded_tables.announce([], stand_in_kernels(RecordTable()))
    assert not caplog.records


@pytest.fixture
def store() -> Iterator[distributed.Store]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.distributed_c10d._get_default_store()
    distributed.destroy_process_group()


def test_ranks_with_other_tables_say_so_and_one_alone_does_not(store: distributed.Store, caplog: Caplog) -> None:
    assert loaded_tables.agree("0123456789ab") and loaded_tables.agree("0123456789ab") and not caplog.records
    store.set("tritongemm/tables/2", "ffffffffffff")  # as another rank did that loaded its second table before
    assert not loaded_tables.agree("0123456789ab", generation=2)
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("rank 0 loaded other tuned records (sha256 0123456789ab)") and "ffffffffffff" in line
    assert loaded_tables.agree("0123456789ab")


@each("name", ["a" * 5000, "x/" * 3000, "a" * 300 + ".zip", "a\0b", "a\ud800", "loop"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    refuses("", read_table, name)
    if "\0" not in name and "\ud800" not in name:
        monkeypatch.setenv("TRITONGEMM_CONFIG", name)
        refuses("", read_configured)
