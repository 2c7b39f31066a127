import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nouns import Config, Defaults, FormatRow, Groups, InputError, Operand, Patch, Record, each, registry
from tests.support.refusals import refuses
from tritongemm.plugins.contracts import KernelBackend, ServerFormat
from tritongemm.search_spaces.loader import load_target

NAME = "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
GIVEN = Defaults(family="a8w8_blockscale", groups=Groups(128), fp8_encoding="fn")
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
SHARED, WIDE, UP = (Config("grouped_tile", 16, n, 128, 1, num_warps=4, num_stages=3) for n in (64, 128, 256))


VLLM, SGLANG = (registry.get(ServerFormat, f"{server}_moe_json") for server in ("vllm", "sglang"))


def rows_of(*tokens: int) -> list[FormatRow]:
    return VLLM.list_sizes(768, 2048, GIVEN, 8, tokens)


def record(row: FormatRow, config: Config, us: float, **more: Any) -> Record:
    tools = {"triton": "3.6.0", "torch": "2.13.0", "device": "NVIDIA H200"}
    facts = {"winner": config.backend, "seconds": us * 1e-6, "spread": 0.0, "timer": "graph-events", "target": "sm90"}
    return Record(row.problem, config=config, **{**facts, "toolchain": tools, **more})


def results(rows: list[FormatRow]) -> list[Record]:
    """Each product has a fastest of its own; of those that ran both, `SHARED` takes the least in sum."""
    found = list[Record]()
    for up, down in zip(rows[::2], rows[1::2], strict=True):
        found += [record(up, UP, 10), record(up, SHARED, 12), record(up, WIDE, 11)]
        found += [record(down, SHARED, 6), record(down, WIDE, 9)]
    return found


def test_the_sizes_are_both_products_at_every_m_of_the_ladder() -> None:
    rows = VLLM.list_sizes(768, 2048, GIVEN, 8)
    assert [row.problem.m for row in rows[::2]] == [m * 8 for m in LADDER]
    up, down = rows[0].problem, rows[1].problem
    assert (up.n, up.k, down.n, down.k) == (1536, 2048, 2048, 768)
    assert up.groups == Groups(128) and up.scales == "block_rows" and not up.b.row_major
    assert [row.problem.m for row in rows_of(3)] == [24, 24]
    skewed = VLLM.list_sizes(768, 2048, replace(GIVEN, groups=Groups(128, spread="skewed")), 8, (64,))
    assert {row.problem.groups for row in skewed} == {Groups(128, spread="skewed")}
    refuses("129 of 128 experts", VLLM.list_sizes, 768, 2048, GIVEN, 129)
    with pytest.raises(InputError, match="vLLM has no tables of family dense of bf16; choose --family: a8w8_blocks"):
        VLLM.list_sizes(768, 2048, replace(GIVEN, family="dense", a=Operand("bf16")), 8)


@each("target", ["sm90", "gfx942", "gfx950"])
def test_what_the_servers_run_today_can_be_raced(target: str) -> None:
    facts, triton = load_target(target), registry.get(KernelBackend, "triton")
    (up, down) = VLLM.list_sizes(768, 2048, replace(GIVEN, fp8_encoding=facts.fp8), 8, (16,))
    for server in (VLLM, SGLANG):
        limits = server.limits("a8w8_blockscale", facts)
        assert limits.templates == ("grouped_tile",) and limits.most_splits == 1 and limits.first
        for config in limits.first:
            assert server.can_express(config) and not server.can_express(replace(config, split_k=2))
            assert triton.check(config, up.problem, facts) and triton.check(config, down.problem, facts)


def test_the_config_that_is_fastest_at_both_products_is_written() -> None:
    rows = rows_of(1, 16)
    translated = VLLM.translate_rows(rows, results(rows), {})
    assert translated.count == 4 and not translated.omitted and list(translated.files) == [NAME]
    table = json.loads(translated.files[NAME])
    assert [int(m) for m in table] == list(LADDER)
    ours = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    assert table["1"] == table["16"] == {**ours, "num_stages": 3}
    assert table["2"]["num_stages"] == 4 and table["4096"]["BLOCK_SIZE_M"] == 64, "elsewhere it runs what it does today"
    again = VLLM.translate_rows(rows, results(rows), translated.files)
    assert not again.files and again.count == 4
    with_remark = json.dumps({"triton_version": "3.4.0", **table}, indent=4)
    assert not VLLM.translate_rows(rows, results(rows), {NAME: with_remark}).files
    changed = VLLM.translate_rows(rows_of(96), results(rows_of(96)), {NAME: with_remark}).files[NAME]
    assert json.loads(changed)["96"] == table["1"] and json.loads(changed)["triton_version"] == "3.4.0"
    (name,) = SGLANG.translate_rows(rows, results(rows), {}).files
    assert name == NAME.replace("128,128", "128, 128")


def test_what_can_not_be_expressed_has_a_reason() -> None:
    rows = rows_of(16)
    other = Config("grouped", 16, 64, 128)
    cases = (
        ([record(rows[0], UP, 10), record(rows[1], SHARED, 6)], ""),
        ([record(rows[0], other, 10), record(rows[1], other, 6)], "none of the server's kernels ran both"),
        ([record(r, SHARED, 5, timer="model") for r in rows], "a prediction"),
        ([record(r, SHARED, 5, toolchain={}) for r in rows], "on which device"),
        ([record(rows[0], SHARED, 5)], ""),
    )
    for found, why in cases:
        translated = VLLM.translate_rows(rows, found, {})
        assert not translated.files and not translated.count and len(translated.omitted) == len(found)
        assert all(why in reason for _, reason in translated.omitted)
    translated = VLLM.translate(results(rows), {})
    assert not translated.files and all("--top_k" in reason for _, reason in translated.omitted)
    refuses("name a folder", VLLM.translate_rows, rows, results(rows), {"": "{}"})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = VLLM.list_sizes(768, 2048, GIVEN, 8)
    folder = tmp_path / "configs" / "triton_3_6_0"
    folder.mkdir(parents=True)
    for server in (VLLM, SGLANG):
        for name, text in server.translate_rows(rows, results(rows), {}).files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.servers
def test_vllms_own_loader_reads_the_table(written: Path, monkeypatch: Patch) -> None:
    loader = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe", exc_type=ImportError)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(written))
    monkeypatch.setattr(loader, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    found = loader.get_moe_configs.__wrapped__(128, 768, "fp8_w8a8", 128, 128)
    assert sorted(found) == list(LADDER) and found[16]["BLOCK_SIZE_N"] == 64


@pytest.mark.servers
def test_sglangs_own_loader_reads_the_table(written: Path, monkeypatch: Patch) -> None:
    place = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
    loader = pytest.importorskip(place, exc_type=ImportError)
    settings = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(written.parents[1]))
    monkeypatch.setattr(loader, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(loader, "get_exec", lambda: settings)
    monkeypatch.setattr(loader, "triton", SimpleNamespace(__version__="3.6.0"))
    found = loader.get_moe_configs.__wrapped__(128, 768, "fp8_w8a8", 128, 128)
    assert sorted(found) == list(LADDER) and found[4096]["num_warps"] == 4
