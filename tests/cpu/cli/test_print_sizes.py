import json
from pathlib import Path

import pytest

from tests.cpu.workloads.test_model_sizes import MIXTRAL
from tests.support.nouns import Capsys, Patch, cases
from tritongemm.cli import tune

pytestmark = pytest.mark.usefixtures("without_gpu")

# fp8 of another encoding than that of gfx942, in the second row.
SIZES = "- {M: 16, N: 64, K: 64}\n- {M: 17, N: 64, K: 64, dtype_a: fp8e4m3fn}\n- {M: 18, N: 64, K: 64, dtype_a: bf16}\n"
REASON = "row 2 (line 2): 17x64x64_fp8e4m3fn-fp8e4m3fn-fp16_TT: gfx942 has no matrix instruction for fp8e4m3fn (A)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sizes.yaml").write_text(SIZES)
    return tmp_path


def listed(capsys: Capsys) -> tuple[list[str], list[str]]:
    """M of each size of the table, and the lines on the standard error."""
    out, err = capsys.readouterr()
    return [line.split()[1] for line in out.splitlines()[1:]], err.splitlines()


def test_a_row_that_the_target_can_not_compute_is_refused(capsys: Capsys, folder: Path) -> None:
    argv = ["--gemm_size_file", "sizes.yaml", "--target", "gfx942"]
    assert tune.main([*argv, "--print_sizes"]) == 2
    sizes, said = listed(capsys)
    assert sizes == ["16", "18"] and said[0] == "2 sizes" and said[1].startswith(f"refused: sizes.yaml: {REASON}")
    assert said[2].startswith("error: a run would end before it tunes any of these; remove what is refused")
    assert tune.main([*argv, "-o", "out.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: sizes.yaml: {REASON}")
    assert [path.name for path in folder.iterdir()] == ["sizes.yaml"]


def test_a_servers_table_is_tuned_for_the_device_that_its_name_says(capsys: Capsys) -> None:
    words = ["--for", "vllm", "-n", "256", "-k", "256", "-m", "16", "--family", "a8w8_blockscale", "--print_sizes"]
    for device, status in {"NVIDIA_H200": 0, "AMD_Instinct_MI350_OAM": 0, "Abacus": 2}.items():
        name = f"N=256,K=256,device_name={device},dtype=fp8_w8a8,block_shape=[128,128].json"
        assert tune.main([*words, "-o", name]) == status  # gfx942 has another encoding than such tables
    assert "no target is known by the device's name; give one with --target" in capsys.readouterr().err


def test_a_workload_is_tuned_without_such_rows(capsys: Capsys) -> None:
    assert tune.main(["--workload", "sizes.yaml", "--target", "gfx942", "--print_sizes"]) == 0
    sizes, said = listed(capsys)
    assert sizes == ["1", "16", "1", "16", "18"] and said[1] == "5 sizes"
    assert said[2].startswith(f"refused: sizes.yaml: {REASON}") and len(said) == 3


def test_groups_with_room_have_no_tables_and_those_of_a_models_experts_are_over_tokens(capsys: Capsys) -> None:
    words = "--m_range 1-8 --target gfx942 --print_sizes"
    argv = f"-n 64 -k 64 --groups 4 --group_form masked --room 8 {words}"
    assert tune.main(argv.split()) == 2 and "tune each as a size" in capsys.readouterr().err
    Path("config.json").write_text(json.dumps(MIXTRAL | {"num_experts_per_tok": 2}))
    assert tune.main(f"--model_dir . {words}".split()) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    found = {word: [m for key, m in rows if word in key] for word in ("groups8", "x6144x")}
    assert found == {"groups8": ["2", "16"] * 2, "x6144x": ["1", "8"]}


def test_a_workloads_sizes_are_those_of_its_tables(capsys: Capsys) -> None:
    of_each = "M: 5, K: 64, rowMajorB: N"
    rows = [f"{{{of_each}, N: 64, count: 7, callers: [a.q_proj]}}"]
    rows += [f"{{{of_each}, N: 32, count: 14, callers: [a.k_proj, a.v_proj]}}"]
    Path("sizes.yaml").write_text("".join(f"- {row}\n" for row in rows))
    assert tune.main(["--workload", "sizes.yaml", "--target", "gfx942", "--print_sizes"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1:5] for line in out.splitlines()[1:]] == [
        [m, n, "64", count] for n in ("64", "32", "128") for m, count in (("1", "0"), ("5", "14" if n == "32" else "7"))
    ]
    assert out.splitlines()[-1].endswith("a.q_proj, a.k_proj, a.v_proj") and "joined: " in err
    assert "3 tables over M: these sizes are searched, " in err and "6 sizes" in err


def test_a_file_without_sizes_is_refused_as_is_one_of_which_none_is_left(capsys: Capsys) -> None:
    Path("sizes.yaml").write_text(SIZES.splitlines()[1])
    for argv in (["-m", "1", "-n", "2", "-k", "3", "-dtype_a", "fp8e4m3fn"], ["--workload", "sizes.yaml"]):
        assert tune.main([*argv, "--target", "gfx942", "--print_sizes"]) == 2
        sizes, said = listed(capsys)
        assert not sizes and said[0] == "0 sizes" and "gfx942 has no matrix instruction for fp8e4m3fn" in said[1]
    Path("bf16_untuned_gemm.csv").write_text("M,N,K,bias,dtype,outdtype\n")
    assert tune.main(["--gemm_size_file", "bf16_untuned_gemm.csv", "--print_sizes"]) == 2
    assert capsys.readouterr().err == ("error: bf16_untuned_gemm.csv contains no sizes; write one line per size\n")


def test_rows_of_other_targets_in_aiters_files_are_named_one_by_one(capsys: Capsys) -> None:
    """They cost a run nothing but themselves; a row that no target computes is refused."""
    lines = ["M,N,K,q_dtype_w", "16,64,64,torch.int8", *(f"{m},64,64,torch.float8_e4m3fn" for m in (1, 2))]
    argv = ["--gemm_size_file", "a8w8_untuned_gemm.csv", "--target", "gfx942", "--print_sizes"]
    Path("a8w8_untuned_gemm.csv").write_text("\n".join(lines))
    assert tune.main(argv) == 0
    sizes, said = listed(capsys)
    assert sizes == ["16"] and [line.partition(": row ")[2][:10] for line in said[1:]] == ["2 (line 3)", "3 (line 4)"]
    Path("a8w8_untuned_gemm.csv").write_text("\n".join([*lines, "4,64,64,torch.bfloat16"]))
    assert tune.main(argv) == 2
    sizes, said = listed(capsys)
    assert sizes == ["16"] and "row 4 (line 5)" in said[3] and said[4].startswith("error: ")


@pytest.mark.filterwarnings("error::tritongemm.core.errors.UntunableRowsWarning")  # it is reported once
def test_a_row_that_no_family_computes_is_refused(capsys: Capsys) -> None:
    Path("untuned.csv").write_text("GemmTunableOp_double_TN,tn_64_16_64\nGemmTunableOp_Half_TN,tn_64_16_64\n")
    assert tune.main(["--gemm_size_file", "untuned.csv", "--print_sizes"]) == 1
    sizes, said = listed(capsys)
    assert sizes == ["16"] and said[1].startswith("refused: untuned.csv: row 1 (line 1) can't be tuned here: 'double'")


@cases(
    ("--family dense -dtype_a bf16", "16x16x16_bf16_TN"),
    ("-dtype_a fp16 -dtype_c fp32 --bias-vector n", "16x16x16_fp16-fp16-fp32_TN_biasn"),
    ("--family bf16", "16x16x16_bf16_TN"),
    ("--family a8w8_blockscale", "16x16x16_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"),
    ("--family dense", "or, of products without scales, the type with -dtype_a, such as bf16"),
)
def test_a_csv_of_m_n_and_k_alone_has_the_types_that_are_named(words: str, key: str, /, capsys: Capsys) -> None:
    Path("s.csv").write_text("M,N,K\n16,16,16\n")
    tune.main(["--gemm_size_file", "s.csv", "--target", "sm90", "--print_sizes", *words.split()])
    out, err = capsys.readouterr()
    assert key in out + err
