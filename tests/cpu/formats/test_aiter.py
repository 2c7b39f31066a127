from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.foreign_rows import AITER_HEADER as BF16
from tests.support.nouns import Backend, Config, Problem, Record, TunerFormat, cases, each, loader, matrices, registry
from tests.support.refusals import refuses
from tritongemm.backends.asm import backend as asm
from tritongemm.core.errors import DamagedFileWarning, InputError
from tritongemm.core.format_row import Defaults, FormatRow, NamedKernel

ASM = "_ZN5aiter39bf16gemm_fp32bf16_tn_64x64_splitk_cleanE"
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x256_MI16x16x1_GSU2_SN"
OLDER = "M,N,K,bias,dtype,outdtype,scaleAB"
DEVICE, CK = "gfx,cu_num", "kernelId,splitK,us,kernelName,tflops,bw,errRatio"
TUNED = {
    "bf16_tuned_gemm.csv": f"""{BF16}
gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,asm,5,13,7.9191,{ASM},0.0,21.19,417.92
gfx950,256,1,18992,4096,True,torch.bfloat16,torch.bfloat16,False,False,hipblaslt,440598,0,30.2981,{TENSILE},0.0,5.14,5.1
gfx950,256,128,32,6144, False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,8.2742,native,0.0,6.1,1.2
gfx1250,96,1,64,4096,FALSE,torch.bfloat16,torch.bfloat16,FALSE,FALSE,triton,0,0,0.0,auto,0.0,0.0,0.0
""",
    "a8w8_tuned_gemm.csv": """gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx942,80,1,1280,8192,torch.int8,34,0,20.5611,a8w8_rowwise_256x16x64x512_16x16_1x1_intrawave_v3,1.02,510.5,0.0
""",
    "a8w8_bpreshuffle_tuned_gemm.csv": f"""{DEVICE},M,N,K,q_dtype_w,libtype,{CK}
gfx942,80,128,128,5120,torch.int8,asm,0,8,7.3189,_ZN5aiter41I8gemm_bf16_perTokenI8_BpreShuffle_16x128E,22.92,183.56,0.182
""",
    "glm5_a8w8_blockscale_bpreshuffle_tuned_gemm.csv": f"""{DEVICE},M,N,K,libtype,{CK}
gfx950,256,16,512,7168,asm,6,7,7.9691,_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_32x128E,14.74,476.98,0.0029
gfx950,256,2048,512,7168,ck,17,3,21.5224,a8w8_blockscale_bpreshuffle_1x128x128_256x64x64x256_v1,698.45,950.04,0.0
""",
    "a4w4_blockscale_tuned_gemm.csv": """gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx950,256,1,512,4096,21,3,5.4049,_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E,0.78,194.57,0.0

gfx950,256,2,512,4096,21,0,5.4049,_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E,0.78,194.57,0.0
""",
    "bf16_tuned_batched_gemm.csv": """gfx,cu_num,B,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio
gfx942,304,16,1,1280,8192,78,0,111.9323,bf16_batched_64x16x16x64_16x16_1x1_interwave_v2,3.0,3000.45,0.0
""",
    # of the wheel 0.1.7: no gfx, cu_num eighth; and gradlib's soltimes
    "older_bf16_tuned_gemm.csv": f"""{OLDER},cu_num,libtype,solidx,splitK,soltimes,kernelName,tflops,bw
64,256,5120,False,torch.bfloat16,torch.float32,False,304,asm,5,13,7.9191,{ASM},21.19,417.92
""",
}
MOE_KEYS = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
FP8 = "torch.float8_e4m3fnuz"
KIND = f"2304,1536,8,2,ActivationType.Gelu,torch.bfloat16,{FP8},{FP8},QuantType.per_Token,1,1"
MOE = f"""cu_num,{MOE_KEYS},block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw,_tag
80,4,{KIND},32,0,17.8,_ZN5aiter1E,0.0%,14.5,moe_ck2,0.0%,32.3123,0,5.26,2629.41,
80,8,{KIND},32,0,17.8,_ZN5aiter1E,0.0%,14.5
"""
BEST = Record(
    Problem(16, 512, 4096, *matrices("bf16", layout="TN")), "gfx942", Config("tile", 16, 16, 16), "triton",
    5e-6, 0.01, "events", library="torch", library_seconds=9e-6, compute_units=304,
)  # fmt: skip


def plugin() -> TunerFormat:
    return registry.get(TunerFormat, "aiter")


def read(name: str, text: str, family: str = "dense") -> list[FormatRow]:
    return plugin().read(Path(name), text, Defaults(family=family))


def save(text: str, *records: Record) -> tuple[list[str], tuple[str, ...]]:
    found = plugin().translate(records, {"": text})
    return found.files[""].splitlines(), tuple(reason for _, reason in found.omitted)


def test_problems_are_a_linear_layers_and_kernels_that_can_be_run_are_configs() -> None:
    first, second, third, fourth = read("bf16_tuned_gemm.csv", TUNED["bf16_tuned_gemm.csv"])
    assert first.problem.key == "64x256x5120_bf16-bf16-fp32_TN" and (first.target, first.compute_units) == (
        "gfx950",
        256,
    )
    assert second.problem.bias == "n" and third.problem.bias == fourth.problem.bias == "none"
    assert first.record and first.record.seconds == 7.9191e-6 and first.record.winner == "asm"
    assert fourth.config is None and fourth.record is None, "a placeholder, and AITER's own Triton kernel"
    assert first.config and (first.config.template, first.config.split_k) == (ASM, 13)
    assert first.record and save(f"{BF16}\n", first.record)[0][1].partition(",asm,")[2].startswith("5,13,7.9191,")
    assert second.config and second.config.backend == "blaslt" and second.config.split_k == 2
    assert (second.config.option("index"), second.config.option("version")) == (440598, 0), "found again by its name"
    assert third.config and third.config.backend == "torch"


@cases(
    ("a8w8_tuned_gemm.csv", ["1x1280x8192_int8-int8-bf16_TN_a8w8"], [None]),
    ("a8w8_bpreshuffle_tuned_gemm.csv", ["128x128x5120_int8-int8-bf16_TN_a8w8_shuffled_16x16"], [8]),
    (
        "glm5_a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
        [f"{m}x512x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale_shuffled_16x16" for m in (16, 2048)],
        [7, None],
    ),
    (
        "a4w4_blockscale_tuned_gemm.csv",
        [f"{m}x512x4096_fp4e2m1-fp4e2m1-bf16_TN_a4w4_blockscale_shuffled_16x16" for m in (1, 2)],
        [8, 1],
    ),
    ("bf16_tuned_batched_gemm.csv", ["1x1280x8192_bf16_TN_batch16"], [None]),
    ("older_bf16_tuned_gemm.csv", ["64x256x5120_bf16-bf16-fp32_TN"], [13]),
)
def test_families(name: str, keys: list[str], splits: list[int | None], /) -> None:
    """A split is literal but in a4w4, where it is an exponent of two; AITER's a4w4 has a shuffled B."""
    rows = read(name, TUNED[name])
    assert [row.problem.key for row in rows] == keys
    assert [row.config and row.config.split_k for row in rows] == splits


def test_a_gpu_is_known_from_its_units_and_scales_of_entire_operands_are_refused() -> None:
    (row,) = read("older_bf16_tuned_gemm.csv", TUNED["older_bf16_tuned_gemm.csv"])
    assert (row.target, row.compute_units) == ("gfx942", 304) and row.record and row.record.seconds == 7.9191e-6
    text = TUNED["glm5_a8w8_blockscale_bpreshuffle_tuned_gemm.csv"].replace("gfx950,256", "gfx942,304")
    assert {row.problem.a.dtype for row in read("a8w8_blockscale_bpreshuffle.csv", text)} == {"fp8e4m3fnuz"}
    head = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n"
    with pytest.raises(InputError, match=r"^[^()]* row 1 \(line 2\) can't be: scaleAB is True: .* can't be tuned here"):
        read("bf16.csv", head + "1,2,3,False,torch.bfloat16,torch.bfloat16,True,False\n")
    (row,) = read("bf16.csv", head + "1,16,128,False,torch.bfloat16,torch.bfloat16,False,True\n")
    assert row.problem.b.order == "shuffled_16x16"


def test_an_assembly_config_is_its_manifests(tmp_path: Path) -> None:
    """So that a row's kernel is launched as if this project's tuner had found it."""
    manifest = tmp_path / "bf16gemm_fp32bf16.csv"
    manifest.write_text(
        f"knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n{ASM},a.co,1,64,64,0,0,1,64,1\n"
    )
    row = read("bf16_tuned_gemm.csv", TUNED["bf16_tuned_gemm.csv"])[0]
    offered, refused = asm.survey(row.problem, loader.load_target("gfx950"), [manifest])
    assert not refused and row.config in offered


@each("name", ["sizes.csv", "dir_a4w4/sizes.csv"])
def test_a_bare_file_is_refused_with_the_choices(name: str) -> None:
    refuses(
        r"several families; name one with --family.*a8w8_bpreshuffle.*a4w4_blockscale", read, name, "M,N,K\n1,2,3\n"
    )


def test_the_users_word_decides_the_family_and_tables_of_others_are_left() -> None:
    text = "M,N,K\n1, 16384, 16384\n"
    for word in ("a4w4_blockscale", "a4w4_bpreshuffle"):
        assert read("sizes.csv", text, word)[0].problem.b.order == "shuffled_16x16"
    refuses("no family is called 'a9w9'; there are: a16w4, ", read, "sizes.csv", text, "a9w9")
    assert read("sizes.csv", "B,M,N,K\n4,1,2,3\n", "a8w8")[0].problem.batch == 4
    assert not plugin().recognises(Path("x.csv"), "size,M,N,K,dtype_a\n")
    assert not plugin().recognises(Path("x.csv"), "N,K\n")


@cases(
    ("K,N,M", "256,512,16"),
    (" N , M,K", "512,16, 256"),
    (",M,N,K", "0,16,512,256"),  # pandas wrote its row numbers too
    ("Unnamed: 0,N,M,K", "7,512,16,256"),
    ("M,N,K,whatever", "16,512,256,x"),
)
def test_columns_may_stand_in_any_order(header: str, row: str, /) -> None:
    path, text = Path("a8w8_blockscale_untuned_gemm.csv"), f"{header}\n{row}\n"
    assert plugin().recognises(path, text)
    (found,) = plugin().read(path, text, Defaults())
    assert (found.problem.m, found.problem.n, found.problem.k) == (16, 512, 256)


def test_doubles_are_dropped_and_faster_lines_that_are_there_stay() -> None:
    line = TUNED["bf16_tuned_gemm.csv"].splitlines()[1]
    slower, placeholder = line.replace("7.9191", "9.5"), line.replace("7.9191", "0")
    with pytest.warns(DamagedFileWarning, match="2 rows repeat others, .* the first is in line 2"):
        rows = read("bf16_tuned_gemm.csv", f"{BF16}\n{placeholder}\n{slower}\n{line}\n")
    assert [row.line for row in rows] == [4]
    line = "gfx942,304,16,512,4096,False,torch.bfloat16,torch.bfloat16,False,False,flydsl,3,0,{},flydsl_x,0.0,1.0,1.0"
    there = f"{BF16}\n{line.format('8.0')}\n"
    lines, (lost,) = save(there, BEST)
    assert lines == there.splitlines() and "stays" in lost
    assert save(f"{BF16}\n{line.format('0.0')}\n", BEST)[0][1].split(",")[10] == "torch", "a placeholder does not"


@each("us", ["0", "0.0", "-1", "inf", "nan", "", "x", "1e-999999", "1e999999"])
def test_what_is_no_time_gives_no_result(us: str) -> None:
    row = read("bf16_tuned_gemm.csv", TUNED["bf16_tuned_gemm.csv"].replace("7.9191", us))[0]
    assert row.config is not None and row.record is None


@each("name", TUNED)
def test_what_was_read_and_is_reported_changes_nothing(name: str) -> None:
    for text in (TUNED[name], TUNED[name].removesuffix("\n"), TUNED[name].replace("\n", "\r\n")):
        records = [row.record for row in read(name, text) if row.record]
        found = plugin().translate(records, {"": text})
        assert found.files[""] == text and not found.omitted and found.count == len(records)
        anew = plugin().translate(records, {"": ""}).files[""]
        assert plugin().translate(records, {"": anew}).files[""] == anew


def test_a_retuned_row_alone_changes() -> None:
    text = TUNED["bf16_tuned_gemm.csv"]
    record = read("bf16_tuned_gemm.csv", text)[0].record
    assert record and record.config
    lines, lost = save(text, replace(record, seconds=6e-6, config=replace(record.config, split_k=8)))
    assert not lost and lines[1] == (
        f"gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,asm,5,8,6.0,{ASM},0.0,27.96,557.06"
    )
    assert lines[:1] + lines[2:] == text.splitlines()[:1] + text.splitlines()[2:]
    text = TUNED["a4w4_blockscale_tuned_gemm.csv"]
    record = read("a4w4_blockscale_tuned_gemm.csv", text)[1].record
    assert record
    lines, _ = save(text, replace(record, config=replace(record.config, split_k=4), seconds=5e-6))
    assert lines[3].startswith("gfx950,256,2,512,4096,21,2,5.0,_ZN5aiter41f4gemm") and lines[2] == ""


def test_a_triton_winner_is_written_as_what_aiter_has() -> None:
    lines, (lost,) = save("", BEST)
    assert lines == [
        BF16,
        "gfx942,304,16,512,4096,False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,9.0,native,0.0,7.46,482.42",
    ]
    assert "AITER has no kernel for tile 16x16x16 w4 s2 (5.00 us); written as torch native (9.00 us)" in lost
    finalist = replace(
        BEST, config=Config(TENSILE, 16, 16, 256, options=(("index", 7), ("version", 1)), backend="blaslt"),
        winner="blaslt", seconds=7e-6, library="", library_seconds=None,
    )  # fmt: skip
    lines, _ = save("", BEST, finalist)
    assert f",hipblaslt,7,0,7.0,{TENSILE}," in lines[1], "the fastest of those that it has"


def test_new_rows_keep_a_sorted_file_sorted() -> None:
    """By device, then N before M; in a file that is not sorted they are the last."""
    wide = replace(BEST, problem=replace(BEST.problem, m=8, n=1024))
    small = replace(BEST, problem=replace(BEST.problem, m=1))
    text = "\n".join(save("", wide, BEST)[0]) + "\n"
    assert [line.split(",")[2:4] for line in save(text, small)[0][1:]] == [["1", "512"], ["16", "512"], ["8", "1024"]]
    header, first, second = text.splitlines()
    unsorted = f"{header}\n{second}\n{first}\n"
    assert save(unsorted, small)[0][:3] == [header, second, first] and plugin().arrange(unsorted) == text


def test_files_of_a_family_are_merged_by_key_in_the_columns_of_all_generations() -> None:
    text = TUNED["bf16_tuned_gemm.csv"]
    faster, slower, other = (
        text.splitlines()[1].replace(*pair) for pair in (("7.9191", "6.5"), ("7.9191", "9"), (",64,", ",65,"))
    )
    paths = [
        (Path("a.csv"), text),
        (Path("b.csv"), f"{BF16}\n{slower}\n{other}\n"),
        (Path("c.csv"), f"{BF16}\n{faster}\n"),
    ]
    merged = plugin().merge(paths)
    assert merged and merged.text.splitlines() == [BF16, faster, *text.splitlines()[2:], other]
    assert len(merged.notes) == 2 and "b.csv: 1 lines are as fast" in merged.notes[0]
    assert (plugin().merge(paths[:1] * 3) or merged).text == text
    name = "older_bf16_tuned_gemm.csv"
    merged = plugin().merge([(Path(name), TUNED[name]), (Path("new.csv"), TUNED["bf16_tuned_gemm.csv"])])
    assert merged
    found = {(row.target, row.compute_units, row.problem.m) for row in read(name, merged.text)}
    gfx950 = {("gfx950", 256, m) for m in (64, 1, 128)}
    assert found == {("gfx942", 304, 64), ("gfx1250", 96, 1), *gfx950}
    assert "us" not in merged.text.splitlines()[0].split(","), "soltimes is its older name"
    with pytest.raises(InputError, match=r"of AITER's family a8w8, and .* of bf16; merge each alone"):
        plugin().merge([(Path(n), TUNED[n]) for n in ("bf16_tuned_gemm.csv", "a8w8_tuned_gemm.csv")])
    with pytest.raises(InputError, match="has sizes and the other has results"):
        plugin().merge(
            [(Path("a4w4.csv"), "M,N,K\n1,2,3\n"), (Path("a4w4.csv"), TUNED["a4w4_blockscale_tuned_gemm.csv"])]
        )


@pytest.mark.parametrize(("ended", *"ab"), [(True, "\n", "\r\n"), (False, "\r\n", "\n"), (False, "\r\n", "\r\n")])
def test_lines_of_a_merged_file_end_alike(ended: bool, a: str, b: str) -> None:
    """As the first file's do, wherever a line comes from."""
    first, row = TUNED["a8w8_tuned_gemm.csv"].splitlines()
    rows = [row.replace(",80,1,", f",80,{m},") for m in (1, 8)]
    texts = [end.join([first, row, "torn"]) + end * ended for end, row in zip((a, b), rows, strict=True)]
    merged = plugin().merge([(Path("a8w8_tuned.csv"), text) for text in texts])
    assert merged and merged.text.split(a) == [first, rows[0], "torn", rows[1], ""]


def test_moe_files_pass_through_and_merge_by_key() -> None:
    """A row with too few cells, as AITER ships some, is kept once."""
    path = Path("tuned_fmoe.csv")
    merged = plugin().merge([(path, MOE), (path, MOE)])
    assert merged and merged.text == MOE
    newer = MOE.splitlines()[1].replace("32.3123", "30.0")
    merged = plugin().merge([(path, MOE), (path, MOE.splitlines()[0] + f"\n{newer}")])
    assert merged and merged.text.splitlines() == [MOE.splitlines()[0], newer, MOE.splitlines()[2]]


def test_a_name_of_a_kernel_is_no_code() -> None:
    for name in ("../../x", "a b", "_ZN__bm16x16__x", "x" * 5000, "Cijk_\x1b[2J"):
        for library in ("asm", "hipblaslt"):
            backend = registry.get(Backend, registry.resolve(Backend, library))
            assert backend.config_of(NamedKernel(library, name)) is None or name.isidentifier()
    text = TUNED["bf16_tuned_gemm.csv"].replace(ASM, "_Z__bm1x1__bm2__bn3__bk4__gm5__sk6__w7__s8")
    row = read("bf16_tuned_gemm.csv", text)[0]
    assert row.config is None or Config.parse(row.config.name) == row.config
