import dataclasses
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu.formats import test_aiter as aiter
from tests.cpu.formats import test_aiter_moe as moe
from tests.cpu.formats import test_hipblaslt_override as override
from tests.cpu.formats import test_inductor_lookup as inductor
from tests.cpu.formats import test_tensile_logic as tensile
from tests.cpu.formats import test_tile_tables as tables
from tests.cpu.formats import test_tunableop as tunableop
from tests.cpu.formats import test_vllm_batch_invariant as invariant
from tests.support.foreign_rows import REVISION, algorithm, product
from tests.support.nouns import Config, Defaults, Groups, InputError, Problem, Record, each, matrices, refuses, registry
from tritongemm.core.format_row import Translation
from tritongemm.plugins.contracts import ServerFormat, WritableFormat

BF16 = aiter.TUNED["bf16_tuned_gemm.csv"]
LOOKUP = {inductor.MM: [inductor.ROW], f"NVIDIA H200+{inductor.ADDMM}": [inductor.ROW]}
FILES = [
    ("aiter", "bf16_tuned_gemm.csv", BF16),
    ("hipblaslt_override", "tuning.txt", override.TUNED),
    ("inductor_lookup", "table.json", json.dumps(LOOKUP, indent=4)),
    ("sglang_dense_json", tables.BLANK, tables.table()),
    ("sglang_dense_json", tables.CHANNELS, tables.table()),
    ("tensile_logic", str(tensile.PATH), tensile.BASE),
    ("tunableop_csv", "tunableop_results0.csv", tunableop.TUNED),
    ("vllm_batch_invariant", invariant.NAME, invariant.MODULE),
    ("vllm_dense_json", tables.NAME, tables.table()),
    ("vllm_moe_json", tables.EXPERTS, tables.table()),
]


def plugin(name: str) -> WritableFormat:
    return registry.get(WritableFormat, name)


@pytest.mark.filterwarnings("ignore::tritongemm.core.errors.UntunableRowsWarning")
@pytest.mark.parametrize(("name", "path", "entire"), FILES)
@given(st.floats(0, 1), st.integers(0, 200), st.text(max_size=8))
def test_damage_is_named_or_read(name: str, path: str, entire: str, at: float, cut: int, put: str) -> None:
    """Whatever is cut out of a file and put in its place; without results, nothing of it is written otherwise."""
    place = round(at * len(entire))
    text, key = entire[:place] + put + entire[place + cut :], path if "_json" in name else ""
    try:
        assert all(path in d.reason for d in plugin(name).read_usable(Path(path), text, Defaults()).damaged)
    except InputError as error:
        assert path in str(error)
    with suppress(InputError):
        assert plugin(name).translate([], {key: text}).files.get(key, text) == text
    with suppress(InputError):
        assert (merged := plugin(name).merge([(Path(path), text)])) is None or merged.text == text
    with suppress(InputError):
        plugin(name).translate([result_of(name)], {key: text})


def result_of(name: str) -> Record:
    if name == "vllm_batch_invariant":
        return invariant.result(16)
    if isinstance(plugin(name), ServerFormat):
        return tables.result(16)
    return {
        "aiter": aiter.BEST,
        "hipblaslt_override": override.result(product(37)),
        "inductor_lookup": inductor.result(product()),
        "tensile_logic": tensile.result(tensile.problem()),
        "tunableop_csv": tunableop.result(product()),
    }[name]


def in_second_row(name: str, given: Any) -> tuple[Path, str, int, int, int]:
    """A file with a damaged row: its path and text, the rows that are right, the row's number and its line."""
    if name == "aiter":
        return Path("bf16_tuned_gemm.csv"), BF16.replace(given[0], given[1], 1), 3, 1, 2
    if name == "moe":
        return Path("untuned_fmoe.csv"), moe.UNTUNED.replace(*given), 4, 3, 4
    if name == "hipblaslt_override":
        return override.PATH, f"{override.TUNED}{override.HEAD}\n{given}\n", 2, 3, 7
    if name == "inductor_lookup":
        rows = ((inductor.ADDMM, [inductor.ROW]), given)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rows)
        return inductor.PATH, f"{{{lines}}}", 1, 2, 2
    if name == "vllm_dense_json":
        return Path(tables.NAME), f'{{"4": {json.dumps(tables.row())},\n{given}}}', 1, 2, 2
    return tunableop.PATH, f"{tunableop.LINEAR}\n{given}\n", 1, 2, 2


MM, ROW, TILE = inductor.MM, inductor.ROW, json.dumps(tables.row())
DAMAGED: dict[str, list[tuple[Any, str]]] = {
    "aiter": [
        ((",64,256,", ",64,2x6,"), "N must be a whole number from 1 to 2147483647, not '2x6'"),
        ((",64,256,", ",0,256,"), "M must be"),
        ((",64,256,", f",{10**30},256,"), "M must be"),
        (("False,torch.bfloat16", "maybe,torch.bfloat16"), "bias must be True or False, not 'maybe'"),
        (("torch.float32", "torch.float33"), "unknown dtype|outdtype"),
        ((",21.19", ""), "has 17 values for 18 columns"),
        ((",13,7.9", ",-1,7.9"), "splitK must be"),
    ],
    "moe": [
        (("16,7168,256,256,8", "16,7168,256,256,257"), "topk is 257, of 256 experts"),
        (("16,7168", "x,7168"), "token must be"),
    ],
    "hipblaslt_override": [
        ("    T,N,1,6144,16", "has 5 values for 11 columns; it may be cut"),
        ("    X,N,1,6144,16,4096,bf16_r,bf16_r,bf16_r,f32_r,7", "transA must be N or T, not 'X'"),
        ("    T,N,1,6144,-1,4096,bf16_r,bf16_r,bf16_r,f32_r,7", "n must be a whole number, not '-1'"),
        ("    T,N,1,6144,0,4096,bf16_r,bf16_r,bf16_r,f32_r,7", "M must be between 1 and"),
        ("    T,N,1,6144,1,4096,bf16_r,bf16_r,bf16_r,f32_r,x", "solution_index must be a whole number"),
        ("    N,T,8,64,128,32,f16_r,f16_r,f32_r,f32_r,9", "repeats row 2"),
    ],
    "inductor_lookup": [
        ((MM, {}), "must be a list of objects with a template_id"),
        ((MM, [{"BLOCK_M": 16}]), "must be a list of objects with a template_id"),
        ((MM, [{**ROW, "BLOCK_K": 0}]), "BLOCK_K must be a whole number from 1 to"),
        ((MM, [{**ROW, "num_warps": float("nan")}]), "num_warps must be a whole number .* not nan"),
        ((MM, [{**ROW, "kpack": True}]), "kpack must be a whole number"),
        (("sizes", [ROW]), "is no key of Inductor's"),
        ((MM.replace("+mm", "+alpha=1&beta=1+addmm"), [ROW]), "must name the dtype, size and strides of each operand"),
        ((MM.replace("[16, 4096]", "[0, 4096]"), [ROW]), "M must be between 1 and"),
        ((inductor.ADDMM, [ROW]), "repeats row 1"),
    ],
    "vllm_dense_json": [
        ('"triton_version": "3.4.0"', "M 'triton_version': M must be a whole number"),
        ('"016": {}', "M '016': M must be a whole number"),
        (f'"{10**10}": {{}}', "M must be a whole number"),
        ('"16": []', "must be an object of BLOCK_SIZE_M"),
        ('"16": {"BLOCK_SIZE_M": 16}', "it has no BLOCK_SIZE_N, BLOCK_SIZE_K"),
        (f'"16": {json.dumps(tables.row(BLOCK_SIZE_Q=1))}', "BLOCK_SIZE_Q is no key of a row"),
        (f'"16": {json.dumps(tables.row(num_warps="4"))}', "num_warps must be a whole number from 1 to"),
        (f'"16": {json.dumps(tables.row(num_stages=float("nan")))}', "num_stages must be a whole number .* not nan"),
        (f'"16": {json.dumps(tables.row(kpack=10**18))}', "kpack must be a whole number"),
        (f'"4": {TILE}', "repeats row 1"),
    ],
    "tunableop_csv": [
        ("Validator,PT_VERSION", "has no value"),
        ("Gemm", "op must be an operation such as GemmTunableOp_BFloat16_TN, not 'Gemm'"),
        ("GemmTunableOp_BFloat16_TN", "has no params"),
        ("GemmTunableOp_BFloat16_TN,tn_6144_16", "params must be those of"),
        ("GemmTunableOp_BFloat16_TN,nt_1_2_3_ld_1_2_3", "params must be those of"),
        ("GemmTunableOp_BFloat16_TN,tn_0_2_3_ld_1_2_3", "N must be between 1 and"),
        (f"GemmTunableOp_BFloat16_TN,tn_{9**40}_2_3_ld_1_2_3", "params must be those of"),
        ("GemmTunableOp_BFloat16_TN,tn_1_2_3_B_4_ld_1_2_3", "params must name a batch where op is one of batches"),
        ("GemmTunableOp_BFloat16_Half_TN,tn_1_2_3_ld_3_3_1", "op and params do not belong together: 2 dtypes"),
        (f"{tunableop.LINEAR},Default,nan", "ms must be milliseconds, not 'nan'"),
        (f"{tunableop.LINEAR},Default,-1", "ms must be milliseconds"),
    ],
}


@each(("name", "given", "complaint"), [(name, *case) for name, cases in DAMAGED.items() for case in cases])
def test_a_damaged_row_costs_itself_alone(name: str, given: Any, complaint: str) -> None:
    path, text, right, row, line = in_second_row(name, given)
    reader = plugin("aiter" if name == "moe" else name)
    found = reader.read_usable(path, text, Defaults())
    assert len(found.rows) == right and [(d.row, d.line) for d in found.damaged] == [(row, line)]
    said = rf"^{re.escape(str(path))}: row {row} \(line {line}\) .*({complaint})"
    assert re.search(said, found.damaged[0].reason)
    refuses(said, reader.read, path, text, Defaults())


def aiter_loses(why: str, **other: Any) -> tuple[Record, str, str]:
    return dataclasses.replace(aiter.BEST, **other), "", why


def override_loses(why: str, config: Config | None = None, before: str = override.TUNED, **other: Any) -> Any:
    return override.result(other.pop("problem", product()), config, **other), before, why


def tensile_loses(why: str, tile: str = "128x64x64", before: str = tensile.BASE, **other: Any) -> Any:
    return tensile.result(other.pop("problem", tensile.problem()), tile, **other), before, why


def tunableop_loses(why: str, config: Config | None = None, before: str = tunableop.TUNED, **other: Any) -> Any:
    made = tunableop.result(other.pop("problem", product()), other.pop("winner", "torch"), config, **other)
    return made, before, why


NO_HIPBLASLT = "no algorithm of the hipBLASLt"
OTHER_HASH = Config("h", 1, 1, 1, options=(("algo", 3), ("index", 1)), backend="blaslt")
LOST: dict[str, list[tuple[Record, str, str]]] = {
    "aiter": [
        aiter_loses("its time is a prediction", timer="model"),
        aiter_loses("it does not say which GPU it was tuned on", target=""),
        aiter_loses("it does not say how many compute units", compute_units=0),
        aiter_loses("AITER has no kernel for tile", library_seconds=None),
        aiter_loses("the columns of the file can't hold it", problem=aiter.BEST.problem.stored(True, True)),
        aiter_loses("the columns of the file can't hold it", problem=dataclasses.replace(aiter.BEST.problem, bias="m")),
    ],
    "hipblaslt_override": [
        override_loses("a prediction", timer="model"),
        override_loses("hipBLASLt's own choice stays", winner="torch"),
        override_loses("which is no solution of hipBLASLt", Config("tile", 16, 64, 64), winner="triton"),
        override_loses("is of build bf2c3184 of hipBLASLt, the result of", algorithm(version=REVISION + 1)),
        override_loses("no number of a known build", algorithm(version=0)),
        override_loses("no number of a known build", algorithm(index=0)),
        override_loses("does not begin with 'Git Version: '", before=override.BENCH),
        override_loses("are of no products of fp32", problem=product(dtype="fp32")),
        override_loses("single products and batches", problem=Problem(64, 64, 64, groups=Groups(4))),
    ],
    "tensile_logic": [
        tensile_loses("the file has no solution Cijk_", "256x64x64"),
        tensile_loses("no solution", compute_units=80),
        tensile_loses("no solution", target="gfx950"),
        tensile_loses("no solution", problem=tensile.problem(row_major_b=True)),
        tensile_loses("a copy of the logic file that has its solution", before=""),
        tensile_loses("own choice stays", winner="torch"),
    ],
    "tunableop_csv": [
        tunableop_loses("let TunableOp write it first", before=""),
        tunableop_loses("the file is of gfx942, not gfx950", target="gfx950"),
        tunableop_loses("a prediction", timer="model"),
        tunableop_loses("triton won, which TunableOp can't run", winner="triton"),
        tunableop_loses(f"{NO_HIPBLASLT} that the file names", algorithm(version=7), winner="blaslt"),
        tunableop_loses(NO_HIPBLASLT, algorithm(), tunableop.TUNED.replace("100100-bf2c3184", "?"), winner="blaslt"),
        tunableop_loses("what TunableOp calls this product is not known", problem=product(dtype="fp32")),
        tunableop_loses(NO_HIPBLASLT, OTHER_HASH, winner="blaslt"),
    ],
    "vllm_dense_json": [
        (
            dataclasses.replace(tables.result(1), problem=Problem(1, 6144, 4096, *matrices("bf16", layout="TN"))),
            "",
            "vLLM's tables are of a8w8_blockscale, plain B in columns, the usual scales and no bias",
        ),
        (tables.result(1, toolchain={}), "", "does not say on which device"),
        (tables.result(1, timer="model"), "", "a prediction"),
    ],
}


@each(("name", "record", "before", "why"), [(name, *case) for name, cases in LOST.items() for case in cases])
def test_what_can_not_be_expressed_has_a_reason(name: str, record: Record, before: str, why: str) -> None:
    written: Translation = plugin(name).translate([record], {} if "_json" in name else {"": before})
    assert not written.count and all(text == before for text in written.files.values())
    ((same, reason),) = written.omitted
    assert same == record and why in reason
