import dataclasses
import re
from pathlib import Path

from tests.support import DATA
from tests.support.nouns import Defaults, Format, refuses, registry, results_format
from tests.support.plugins import each_with_toy
from tests.support.stores import ONE, TWO, record
from tritongemm.formats import why_unrecognised
from tritongemm.plugins.contracts import ResultsFormat

TOY = "format_toy"
NAMES = [*registry.names(Format), TOY]

_TILE = '"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128'
_TABLES = f'{{"1": {{{_TILE}}},\n"4": {{{_TILE}}}}}'
_DEVICE = "N=2,K=3,device_name=NVIDIA_H200,dtype=fp8_w8a8"
_EXPERTS = "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8"
_LOOKUP = (
    '{"((torch.bfloat16, [1, 3], [3, 1]), (torch.bfloat16, [3, 2], [1, 3]))+mm": [],\n'
    '"((torch.int8, [4, 6], [6, 1]), (torch.int8, [6, 5], [1, 6]))+mm": []}'
)
_SOLUTION = "  - DepthU: 64\n    SolutionIndex: 0\n    SolutionNameMin: Cijk_Alik_Bljk_HHS_BH_MT64x64x64\n"
_LOGIC = (
    "- {MinimumRequiredVersion: 4.33.0}\n- aquavanjaram\n- gfx942\n- [Device 74a1]\n"
    "- DataType: 4\n  DestDataType: 4\n  TransposeA: true\n  TransposeB: false\n"
    f"- {_SOLUTION[2:]}- [2, 3, 0, 1]\n- - - [2, 1, 1, 3]\n    - [0, 0.0]\n  - - [5, 4, 1, 6]\n    - [0, 0.0]\n"
    "- null\n- null\n- DeviceEfficiency\n- Equality\n"
)
_HEAD = "transA,transB,batch_count,m,n,k,a_type,b_type,c_type,compute_type,solution_index"
_OVERRIDE = "".join(f"    {_HEAD}\n    T,N,1,{sizes},f16_r,f16_r,f16_r,f32_r,7\n" for sizes in ("2,1,3", "5,4,6"))
_TILES = "".join(
    f"        {product}: _MatmulShapeConfig(\n            block_k=64,\n            m_buckets=(\n"
    f"                ({m}, _MatmulMConfig(16, 128, 4, 3)),\n            ),\n        ),\n"
    for m, product in ((1, (2, 3)), (4, (5, 6)))
)
_INVARIANT = (
    f'import torch\n\n_BATCH_INVARIANT_MATMUL_TUNED_CONFIGS: dict = {{\n    "hopper": {{\n{_TILES}    }},\n}}\n'
)
# A file of each format as its tool or its user writes it, and one with a wrong row and what names it.
SAMPLES = {
    "hipblaslt_override": ("tuning.txt", f"Git Version: bf2c3184\n{_OVERRIDE}"),
    "inductor_lookup": ("table.json", _LOOKUP),
    "moe_json": ("E=8,N=64,device_name=NVIDIA_H200.json", _TABLES),
    "aiter": ("a8w8_untuned_gemm.csv", "M,N,K\n1,2,3\n4,5,6\n"),
    "native_yaml": ("sizes.yaml", "# of mine\n- {M: 1, N: 2, K: 3, dtype_a: bf16}\n- {M: 4, N: 5, K: 6}\n"),
    "sglang_dense_json": (f"{_DEVICE},block_shape=[128, 128].json", _TABLES),
    "sglang_moe_json": (f"{_EXPERTS},block_shape=[128, 128].json", _TABLES),
    "tensile_logic": ("aquavanjaram_Cijk_Alik_Bljk_HHS_BH.yaml", _LOGIC),
    "tune_gemm": ("sizes.yaml", "- {'M': 1, 'N': 2, 'K': 3}\n- {'M': 4, 'N': 5, 'K': 6}\n"),
    "tunableop_csv": ("untuned.csv", "GemmTunableOp_Half_TN,tn_2_1_3\nGemmTunableOp_Half_TN,tn_5_4_6\n"),
    "vllm_batch_invariant": ("batch_invariant_configs.py", _INVARIANT),
    "vllm_dense_json": (f"{_DEVICE},block_shape=[128,128].json", _TABLES),
    "vllm_moe_json": (f"{_EXPERTS},block_shape=[128,128].json", _TABLES),
    TOY: ("sizes.csv", "toy,M,N,K\na,1,2,3\nb,4,5,6\n"),
}
# Formats whose sizes or kind a file's name has, of which some have no size; and those that leave nothing to the
# caller's defaults.
SIZELESS = ("moe_json", "sglang_moe_json", "vllm_moe_json")
NAMED = ("sglang_dense_json", "vllm_dense_json", *SIZELESS)
ENTIRE = (
    *("hipblaslt_override", "inductor_lookup", "sglang_dense_json", "tensile_logic", "tunableop_csv"),
    *("vllm_batch_invariant", "vllm_dense_json"),
)
WRONG = {
    "hipblaslt_override": (_OVERRIDE.replace("5,4,6", "5,x,6"), r"row 2 \(line 4\) n must be a whole number"),
    "tensile_logic": (_LOGIC.replace("[5, 4, 1, 6]", "[5, 4, 1, 0]"), r"row 2 \(line 15\) K must"),
    "inductor_lookup": (_LOOKUP.replace("[]}", "[0]}"), r"row 2 \(line 2\) .* must be a list"),
    "moe_json": (_TABLES[:-1], r"line 2, column \d+: the file ends too early"),
    "aiter": ("M,N,K\n1, 2, 3\n\n4,x,6\n", r"row 2 \(line 4\) N must"),
    "native_yaml": ("- {M: 1, N: 2, K: 3, dtype_a: bf16}\n- {M: 4, N: 5, K: 0}\n", r"row 2 \(line 2\) K must"),
    "sglang_dense_json": (_TABLES.replace('"4"', '"x"'), r"row 2 \(line 2\) M 'x': M must"),
    "sglang_moe_json": (_TABLES.replace('"4"', '"x"'), r"row 2 \(line 2\) M 'x': M must"),
    "tune_gemm": ("- {M: 1, N: 2, K: 3}\n\n- {M: 4, N: x, K: 6}\n", r"row 2 \(line 3\) N must"),
    "tunableop_csv": (
        "GemmTunableOp_Half_TN,tn_2_1_3\nGemmTunableOp_Half_TN,tn_5_x_6\n",
        r"row 2 \(line 2\) params must",
    ),
    "vllm_batch_invariant": (
        _INVARIANT.replace("(4, _", "(0, _"),
        r"row 2 \(line 11\) \(5, 6\) M must be a whole number",
    ),
    "vllm_dense_json": (_TABLES.replace('64, "BLOCK_SIZE_K": 128}}', "64}}"), r"row 2 \(line 2\) M '4': it has no"),
    "vllm_moe_json": (_TABLES[:-1], r"line 2, column \d+: the file ends too early"),
    TOY: ("toy,M,N,K\na,1,2,3\nb,4,x,6\n", r"row 2 \(line 3\) M, N, K"),
}


plugin = each_with_toy(Format, TOY)


def test_every_format_claims_its_files_and_ours_are_read_back_equal() -> None:
    assert sorted(SAMPLES) == sorted(WRONG) == sorted(NAMES)
    paths = [*DATA.glob("tune_gemm*.yaml"), *DATA.glob("tune_gemm/*.yaml"), *DATA.glob("schema2/*.yaml")]
    assert len(paths) == 6
    for path in paths:
        claims = [f.name for f in registry.every(Format) if f.recognises(path, path.read_text())]
        assert len(claims) == 1, (path, claims)
    given = [record(ONE), dataclasses.replace(record(TWO), tie=True, error=1e-3, compute_units=304)]
    ours = results_format()
    text = ours.write(given)
    path = Path(f"out{ours.suffixes[0]}")
    assert registry.every(ResultsFormat) == [ours]
    assert [f for f in registry.every(Format) if f.recognises(path, text)] == [ours]
    assert [r.record for r in ours.read(path, text, Defaults())] == given


def test_it_is_described_and_names_a_wrong_row(plugin: Format) -> None:
    assert plugin.title and plugin.name in NAMES
    assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in plugin.suffixes)
    text, complaint = WRONG[plugin.name]
    path = Path("folder") / SAMPLES[plugin.name][0]
    refuses(f"^{re.escape(str(path))}: {complaint}", plugin.read, path, text, Defaults())


def test_it_alone_claims_its_file(plugin: Format) -> None:
    """By its contents, whatever the file is called, where other formats have the same suffix."""
    name, text = SAMPLES[plugin.name]
    for path in (Path(name),) if plugin.name in NAMED else (Path(name), Path("sizes")):
        assert [f.name for f in registry.every(Format) if f.recognises(path, text)] == [plugin.name]
    letter = Path("letter.txt"), "Dear reader,\n- so long\n"
    assert not plugin.recognises(*letter) and not why_unrecognised(*letter)


def test_it_reads_rows_in_order(plugin: Format) -> None:
    name, text = SAMPLES[plugin.name]
    if plugin.name in SIZELESS:
        refuses("can't be tuned", plugin.read, Path(name), text, Defaults())
        return
    rows = plugin.read(Path(name), text, Defaults.of("int8", layout="TN"))
    second = (4, 2, 3) if plugin.name in NAMED else (4, 5, 6)
    assert [(r.problem.m, r.problem.n, r.problem.k) for r in rows] == [(1, 2, 3), second]
    assert all(r.line and str(r.problem.m) in text.splitlines()[r.line - 1] for r in rows)
    if plugin.name in ENTIRE:
        return
    assert rows[1].problem.a.dtype == "int8" and not rows[1].problem.b.row_major, "the caller's defaults"
