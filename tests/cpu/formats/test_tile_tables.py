import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.nouns import Config, Defaults, Format, InputError, Record, ServerFormat, make_problem, registry
from tests.support.refusals import refuses
from tests.support.tables import cases, each

VLLM, SGLANG, EXPERTS_TABLE = (
    registry.get(ServerFormat, name) for name in ("vllm_dense_json", "sglang_dense_json", "vllm_moe_json")
)
MOE = registry.get(Format, "moe_json")

NAME = "N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
BLANK = NAME.replace("128,128", "128, 128")
CHANNELS = "N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8_channelwise.json"
EXPERTS = "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def row(block_m: int = 16, **more: Any) -> dict[str, Any]:
    blocks = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16}
    return {**blocks, "num_warps": 4, "num_stages": 4, **more}


def table(rows: dict[int, Any] | None = None, indent: int | None = 4) -> str:
    return json.dumps({str(m): row(16 + m) for m in LADDER} if rows is None else rows, indent=indent)


def result(m: int, config: Config | None = None, **more: Any) -> Record:
    problem = make_problem(Defaults.of(layout="TN", family=more.pop("family", "a8w8_blockscale")), m, 6144, 4096)
    config = config or Config("tile", 32, 64, 128, 8, num_warps=8, num_stages=5)
    facts = {"winner": config.backend, "seconds": 1e-5, "spread": 0.0, "timer": "graph-events", "target": "sm90"}
    facts["toolchain"] = {"triton": "3.6.0", "torch": "2.13.0", "device": "NVIDIA H200"}
    return Record(problem, config=config, **{**facts, **more})


def served(text: str, m: int) -> Any:
    """What the servers take: the config of the nearest M."""
    rows = {int(key): value for key, value in json.loads(text).items()}
    return rows[min(rows, key=lambda known: abs(known - m))]


def test_the_name_has_the_sizes_the_device_and_so_the_encoding_of_fp8() -> None:
    rows = VLLM.read(Path("configs") / NAME, table(), Defaults.of("int8"))
    assert [r.problem.m for r in rows] == list(LADDER)
    first = rows[0]
    assert first.problem == result(1).problem and first.target == "sm90" and (first.line, first.number) == (2, 1)
    assert first.config == Config("tile", 17, 64, 128, 16, num_warps=4, num_stages=4)
    assert table().splitlines()[rows[3].line - 1].strip() == '"8": {'  # type: ignore[operator]
    name = NAME.replace("NVIDIA_H200", "AMD_Instinct_MI300X")
    (found,) = VLLM.read(Path(name), table({8: row(waves_per_eu=2, kpack=1, matrix_instr_nonkdim=16)}), Defaults())
    assert found.target == "gfx942" and found.problem.a.dtype == "fp8e4m3fnuz"
    assert found.config and found.config.options == (("kpack", 1), ("matrix_instr_nonkdim", 16), ("waves_per_eu", 2))


@cases(
    (NAME, "vllm_dense_json"),
    (NAME.replace("fp8_w8a8", "int8_w8a8"), "vllm_dense_json"),
    (BLANK, "sglang_dense_json"),
    (CHANNELS, "sglang_dense_json"),
    (EXPERTS, "vllm_moe_json"),
    (EXPERTS.replace("128,128", "128, 128"), "sglang_moe_json"),
    (EXPERTS.replace("fp8_w8a8", "int8_w8a8"), "moe_json"),
    ("E=8,N=4096,device_name=NVIDIA_H200.json", "moe_json"),
    ("E=8,N=4096,device_name=NVIDIA_H200_down.json", "moe_json"),
    ("E=8,N=4096,device_name=NVIDIA_B200,dtype=int4_w4a16,backend=flydsl.json", "moe_json"),
    ("E=8,N=64,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128, 128]_down.json", "moe_json"),
    ("E=8,N=64,device_name=NVIDIA_H20,dtype=fp8_w8a8,per_channel_quant=True.json", "moe_json"),
    (NAME.replace("fp8_w8a8", "fp8_w8a8_channelwise"), None),
    (NAME.replace("fp8_w8a8", "fp4_w4a4"), None),
    (NAME + ".bak", None),
    ("sizes.json", None),
)
def test_one_format_claims_a_table(name: str, claimed: str | None, /) -> None:
    claims = [f.name for f in registry.every(Format) if f.recognises(Path("configs") / name, table())]
    assert claims == ([claimed] if claimed else [])
    assert not any(f.recognises(Path(name), "M,N,K\n1,2,3\n") for f in (VLLM, SGLANG, MOE, EXPERTS_TABLE)), (
        "a name that does not match"
    )


def test_null_and_rows_that_say_the_same_stay() -> None:
    rows = SGLANG.read(Path(CHANNELS), table({1: row(), 512: None}), Defaults())
    assert [r.problem.family for r in rows] == ["a8w8", "a8w8"] and rows[0].config and rows[1].config is None
    with pytest.raises(InputError, match=r"row 1 \(line 2\) M '512': must be an object of BLOCK_SIZE_M"):
        SGLANG.read(Path(BLANK), table({512: None}), Defaults())
    given = {m: {"num_stages": 2, **row()} for m in LADDER} | {64: {"kpack": 1, **row()}}
    del given[64]["num_stages"]
    text = table(given)
    same = [r.config for r in VLLM.read(Path(NAME), text, Defaults()) if r.problem.m == 64]
    assert not VLLM.translate([result(64, same[0])], {NAME: text}).files


@cases(
    (table()[:-40], "line 143, column 9: Unterminated string"),
    (table()[:-2], "the file ends too early"),
    ("[1, 2]", "{ is expected"),
    ("{}", "has no M"),
    (table() + "{}", "nothing is expected after the object"),
    ('{"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_M": 32}}', "line 1, column 7: the key 'BLOCK_SIZE_M' stands twice"),
    ('{"1": ' + "[" * 100000, "nested too deep|ends too early"),
    ('{"1": ' + "9" * 5000 + "}", "a number has too many digits"),
)
def test_a_damaged_file_is_named(text: str, complaint: str, /) -> None:
    for plugin, name in ((VLLM, NAME), (EXPERTS_TABLE, EXPERTS)):
        if text == "{}" and plugin is EXPERTS_TABLE:
            continue
        with pytest.raises(InputError, match=complaint) as caught:
            plugin.read(Path(name), text, Defaults())
        assert name in str(caught.value)


def test_scales_of_other_blocks_are_refused_and_names_are_sglangs() -> None:
    with pytest.raises(InputError, match=r"block_shape=\[32, 32\]: family a8w8_blockscale has scales for 128 x 128"):
        SGLANG.read(Path(BLANK.replace("128, 128", "32, 32")), table(), Defaults())
    refuses("a mixture of experts by M alone", EXPERTS_TABLE.read, Path(EXPERTS), table(), Defaults())
    with pytest.raises(InputError, match="a mixture of experts by M alone"):
        MOE.read(Path("E=8,N=4096,device_name=NVIDIA_H200.json"), table(), Defaults())
    won = result(16, Config("tile", 16, 32, 256, 1, num_warps=4, num_stages=3), family="a8w8")
    lost = result(512, winner="blaslt", family="a8w8")
    written = SGLANG.translate([won, lost, result(8)], {})
    assert written.count == 3 and not written.omitted and sorted(written.files) == sorted((BLANK, CHANNELS))
    rows = json.loads(written.files[CHANNELS])
    assert rows["16"] == {
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 256, "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    assert rows["512"] is None and rows["33"] is None and list(rows)[-1] == "8192"
    (kept,) = SGLANG.translate([lost], {CHANNELS: table({512: row(), 8: row()})}).files.values()
    assert json.loads(kept)["512"] is None and json.loads(kept)["8"] == row()


def test_new_tables_are_dense_and_short_ones_go_on_serving() -> None:
    """26 of the shipped tables have M from 2048 on alone; a result at M = 16 must not take what is below."""
    written = VLLM.translate([result(13), result(64)], {})
    assert written.count == 2 and not written.omitted and list(written.files) == [NAME]
    text = written.files[NAME]
    assert list(json.loads(text)) == [str(m) for m in sorted({*LADDER, 13})]
    default = {**row(64, BLOCK_SIZE_N=128, GROUP_SIZE_M=32), "num_stages": 2}
    assert served(text, 13) == served(text, 64) == {**row(32, GROUP_SIZE_M=8), "num_warps": 8, "num_stages": 5}
    assert all(served(text, m) == default for m in LADDER if m != 64)
    assert [r.config for r in VLLM.read(Path(NAME), text, Defaults()) if r.problem.m == 13] == [result(13).config]
    text = table({m: row(16 + m) for m in (2048, 3072, 4096)})
    (new,) = VLLM.translate([result(16)], {NAME: text}).files.values()
    assert served(new, 16)["BLOCK_SIZE_M"] == 32
    assert all(served(new, m) == served(text, m) for m in (1, 2, 4, 8, 11, 24, 512, 1500, 2600, 4096))


@each("text", [table(), table(indent=2), table(indent=None), table().replace("\n", "\r\n")])
def test_only_retuned_rows_change(text: str) -> None:
    assert not VLLM.translate([], {NAME: text}).files
    (new,) = VLLM.translate([result(64), result(80)], {NAME: text, "E=1.json": "{"}).files.values()
    ours = {**row(32, GROUP_SIZE_M=8), "num_warps": 8, "num_stages": 5}
    expected = {str(m): ours if m in (64, 80) else row(16 + m) for m in sorted({*LADDER, 80})}
    assert json.loads(new) == expected and list(json.loads(new)) == list(expected)
    indent = 2 if '\n  "' in text else 4 if "\n" in text else None
    assert new == json.dumps(expected, indent=indent).replace("\n", "\r\n" if "\r" in text else "\n")
    assert not VLLM.translate([result(64), result(80)], {NAME: new}).files, "written already"


@cases(
    (result(64, winner="torch"), "torch won, which is not the server's kernel; vLLM runs what it runs today"),
    (result(64, Config("stream_k", 64, 64, 64)), "stream_k__bm64__bn64__bk64__.* is not the server's kernel"),
    (result(64, Config("tile", 64, 64, 64, split_k=2)), "more than a row holds"),
    (result(64, Config("tile", 64, 64, 64, options=(("ahead", 1),))), "more than a row holds"),
    (result(64, Config("tile", 64, 64, 256)), "takes 16, 32, 64, 128 of K at once"),
)
def test_where_another_kernel_won_the_default_is_pinned(other: Record, why: str, /) -> None:
    written = VLLM.translate([other, result(1)], {})
    assert written.count == 1 and [record for record, _ in written.omitted] == [other]
    assert re.search(why, written.omitted[0][1]) and served(written.files[NAME], 64)["num_stages"] == 2
    assert not VLLM.translate([other], {NAME: table()}).files, "a row that is there stays"


def test_of_results_of_one_device_the_first_is_reported_in_no_other_folder() -> None:
    stand_in = result(16, Config("tile", 64, 64, 64))
    written = VLLM.translate([result(16), stand_in], {})
    assert not written.omitted and served(written.files[NAME], 16)["BLOCK_SIZE_M"] == 32
    other = dataclasses.replace(stand_in, compute_units=66)
    assert [r for r, _ in VLLM.translate([result(16), other], {}).omitted] == [other]
    refuses("keeps a folder", VLLM.translate, [result(16)], {"": table()})
    assert all("/" not in name for name in VLLM.translate([result(1, toolchain={"device": "../../etc"})], {}).files)
