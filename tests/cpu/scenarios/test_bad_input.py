from pathlib import Path
from typing import Any

import pytest

from tests.support.nouns import Capsys, Patch, UnavailableError, cases, each, raising, settings
from tritongemm.cli import launch_plan, optimize, options, tune

pytestmark = pytest.mark.usefixtures("without_gpu")

SIZE = ("-m", "16", "-n", "16", "-k", "16")


@cases(
    ("", r"is empty"),
    ("- {M: 1, N: 1, K: 1}\n- {M: 1, N: 1, K: 1, num_wraps: 4}\n", "row 2 (line 2) has an unknown key 'num_wraps'"),
    ("- {M: 1, N: 1, K: 1, dtype: bf16}\n", "has an unknown key 'dtype'; did you mean 'dtype_a'?"),
    ("- {M: 1\n", "not YAML"),
    ("- {M: 1, N: 1, K: 1}\n- {M: 2, N: 2, K: 2, groups: 4, batch: 2}\n", "row 2 (line 2): 2x2x2_fp16_TT_batch2_g"),
    ("- {M: 4, N: 2, K: 2, groups: 2, group_counts: [1, 2]}\n", "row 1 (line 1) can't be: the groups' rows add"),
    ("- {M: 1, N: 1, K: 1}\n- {M: 2, N: 2, K: 2, shared: a}\n", "row 2 (line 2) can't be: shared is 'a'"),
    ("- {M: 1, N: 1, K: 1, dtype_a: fp8e4m3fn}\n", "1x1x1_fp8e4m3fn-fp8e4m3fn-fp16_TT: gfx942 has no matrix"),
)  # fmt: skip
def test_bad_files(text: str, complaint: str, /, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text(text)
    assert tune.main(["--gemm_size_file", str(path), "-o", str(tmp_path / "out" / "out.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@cases(
    ((*SIZE, "--target", "gfx1"), "unknown target 'gfx1'; there are: gfx1100, "),
    (("--model_dir", "absent"), "absent: there is no such folder with a model's config.json, and no downloaded"),
    ((*SIZE, "-dtype_a", "int8", "-dtype_c", "fp16"), "int8 operands need an integer C"),
    (
        (*SIZE, "-dtype_a", "fp8", "--target", "gfx90a"),
        "dtype 'fp8': the target has no fp8; choose another dtype, or a --t",
    ),
    (
        (*SIZE, "--family", "a8w8_blockscale", "--target", "sm80"),
        "dtype 'fp8': the target has no fp8; choose another dtype, or a --target that has it; in others it "
        "computes the families a",
    ),
    ((*SIZE, "-dtype_a", "fp8e4m3fn", "--target", "sm80"), "no matrix instruction for fp8e4m3fn (A); it has no fp8"),
    ((*SIZE, "--gpu_ids", "0"), "need a GPU"),
    ((*SIZE, "--libtype", "abacus"), "--libtype: no backend is called 'abacus'; there are: all, asm, "),
    ((*SIZE, "--libtype", "torch"), "--libtype torch: a library can be asked on its GPU only"),
    (("--gemm_size_file", "absent.yaml"), "absent.yaml: there is no such file"),
    (("--workload", "absent.yaml"), "absent.yaml"),
)
def test_bad_options(argv: tuple[str, ...], said: str, /, tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and not list(tmp_path.iterdir())


OF_TUNE = [
    ((), "name a size with -m, -n and -k, a table with --m_range, -n and -k"),
    ((*SIZE, "--gemm_size_file", "x"), "exclude each other"),
    ((*SIZE, "--compare_wo_tuning"), "name their file with --gemm_size_file"),
    (("-m", "0", "-n", "16", "-k", "16"), "argument -m/--m: '0' is not a whole number from 1 to 2147483647"),
    (("-m", "1", "-n", "٣", "-k", "1"), "argument -n/--n: '٣' is not a whole number"),
    ((*SIZE, "--dtype", "fp7"), "unknown dtype 'fp7'; there are: fp16, bf16, fp32, int8, fp8, bf8 ("),
    ((*SIZE, "-k", "16"), "argument -k/--k: is given twice; name one"),
    ((*SIZE, "--warmup=-1"), "--warmup: '-1' is not a whole number from 0 to 1000000"),
    ((*SIZE, "--algorithms", "1e3"), "--algorithms: '1e3' is not a whole number from 0 to 100000"),
    ((*SIZE, "--budget", "90m"), "'90m' is neither a number of configs, up to 2147483647, nor, as 90s, of seconds"),
    ((*SIZE, "--budget=-1s"), "'-1s' is neither a number of configs"),
    ((*SIZE, "--num-threads", "100000000"), "--num-threads: '100000000' is not a whole number from 0 to "),
    ((*SIZE, "--timeout", "nan"), "--timeout: 'nan' is not a number"),
    ((*SIZE, "--timeout", "1e30"), "--timeout: '1e30' is not a number that is more than 0 and at most 31536000"),
    ((*SIZE, "--min_gain=-1"), "--min-gain: '-1' is not a number that is at least 0 and at most 1000"),
    ((*SIZE, "--errRatio", "1"), "'1' is not a number that is at least 0 and less than 1"),
    ((*SIZE, "--rotating_tensor=-7"), "--rotating-tensor: '-7' is not a whole number from -1 to 1048576"),
    ((*SIZE, "--gpu_ids", "0,,1"), "--gpu-ids: '0,,1' is not a list of numbers of GPUs with commas between"),
    ((*SIZE, "-o", ""), "the name is empty"),
    ((*SIZE, "-o", "\udcff.yaml"), "is no text in this locale"),
    (("--gemm_size_file", "x", "--benchmark", "--profile_file", "y"), "--profile_file lists the candidates"),
    ((*SIZE, "--gpu_ids", "0", "--ngpus", "2"), "exclude each other"),
    ((*SIZE, "--compare", "--benchmark"), "not allowed with"),
    ((*SIZE, "--init_type", "ones"), "invalid choice: 'ones'"),
    ((*SIZE, "--strategy", "abacus"), "invalid choice: 'abacus'"),
    ((*SIZE, "--family", "abacus"), "no family is called 'abacus'; there are: a"),
    ((*SIZE, "-o", "out.csv"), "-o out.csv: results are written as YAML, not as .csv; write -o out.yaml"),
    ((*SIZE, "--tuning_results_file=a/out.JSON"), "results are written as YAML, not as .json; write -o a/out.yaml"),
    ((*SIZE, "-o2x.csv"), "-o2x.csv: there is no option -o2; name the CSV of all candidates with --profile_file"),
    ((*SIZE, "-o2", "x.csv"), "-o2: there is no option -o2; name the CSV of all candidates with --profile_file"),
    (("--m_range", "9-3", "-n", "8", "-k", "8"), "'9-3' is not a range of M such as 1-8192"),
    (("--m_range", "0-3", "-n", "8", "-k", "8"), "'0' is not a whole number from 1"),
    (("--m_range", "1-9", "-m", "4", "-n", "8", "-k", "8"), "-m and --m_range exclude each other"),
    (("--m_range", "1-9", "-n", "8"), "name a size with -m, -n and -k, a table with --m_range, -n and -k"),
    (("--workload", "a", "--gemm_size_file", "b"), "--gemm_size_file and --workload exclude each other"),
    (("--workload", "a", "-m", "4"), "exclude each other"),
    (("--workload", "a", "--benchmark"), "--workload and --m_range tune"),
    (("--tp", "2"), "or a model with --model_dir"),
    ((*SIZE, "--tp", "2"), "--tp is for the sizes of a model: name its folder with"),
    ((*SIZE, "--all_bias"), "--all_bias is for the sizes of a model"),
    (("--model_dir", ".", "-m", "1"), "exclude each other; name values of M with --nsets"),
    (("--model_dir", ".", "--gemm_size_file", "x"), "exclude each other"),
    (("--model_dir", ".", "-col_a"), "a model defines the layouts and biases of its layers"),
    (("--model_dir", ".", "--bias_vector"), "a model defines the layouts and biases of its layers"),
    (("--model_dir", ".", "--nsets", "1,,2"), "--nsets: '' is not a whole number"),
    (("--model_dir", ".", "--nsets"), "--nsets: expected at least one argument"),
    (("--model_dir", ".", "--print_sizes", "--benchmark"), "--benchmark: not allowed with argument --print-sizes"),
]
PLAN, TO_OPTIMIZE = ("-o", "plans"), ("job.log", "-o", "tunings")
OF_OTHERS = [
    (launch_plan, (*PLAN, "--all", "²"), "--all: '²' is not a whole number from 0 to 2147483647"),
    (launch_plan, (*PLAN, "--all", "9" * 100_000), "9…9"),
    (optimize, (*TO_OPTIMIZE, "--population", "8", "--strategy", "guided"), "guided has none"),
    (optimize, (*TO_OPTIMIZE, "--generations", "8", "--budget", "5"), "--generations and --budget exclude each other"),
    (optimize, (*TO_OPTIMIZE, "--thr", "101"), "at most 100"),
    (optimize, (*TO_OPTIMIZE, "--only", "polish"), "invalid choice"),
    (optimize, (*TO_OPTIMIZE, "--devices", "0;1"), "not a list of numbers"),
]


@each(("command", "argv", "complaint"), [*((tune, *row) for row in OF_TUNE), *OF_OTHERS])
def test_options_that_can_not_be(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch, command: Any, argv: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        command.main(argv)
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and complaint in err and not list(tmp_path.iterdir())
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 700


def test_folders_that_can_not_be(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    (tmp_path / "out_kernels").write_text("")
    argv = [*SIZE, "--target", "gfx1100", "--budget=1", "--libtype=triton", "-o", str(tmp_path / "out.yaml")]
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert "out_kernels, the folder of modules, can't be made: File exists; move it away, or choose another" in err
    (tmp_path / "out_kernels").unlink()
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))  # where the user may have that kernel
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert f"compiled kernels can't be kept in {tmp_path / 'cache'}: Not a directory" in err
    assert "TRITONGEMM_CACHE" in err
    assert len((tmp_path / "out.yaml.journal").read_text().splitlines()) == 1, "the header alone"


def test_where_kernels_are_kept(monkeypatch: Patch) -> None:
    """A variable that is empty is not set, and a user without a home gets advice."""
    monkeypatch.setenv("TRITONGEMM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert settings.cache_folder() == Path("/home/someone/.cache/tritongemm")
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=r"File name too long; name another fol"):
        patch.setenv("TRITONGEMM_CACHE", "a" * 300)
        settings.cache_folder()
    monkeypatch.setattr(Path, "expanduser", raising(RuntimeError))  # as where the user is unknown
    with pytest.raises(
        UnavailableError, match="no home folder to keep compiled kernels in: name one in TRITONGEMM_CACHE"
    ):
        settings.cache_folder()


@each("option", ["--compare_wo_tuning", "--benchmark"])
def test_sizes_are_no_results(tmp_path: Path, capsys: Capsys, option: str) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("- {M: 3, N: 5, K: 7}\n")
    assert tune.main(["--gemm_size_file", str(path), option]) == 2
    assert f"{path}: 3x5x7_fp16_TT (line 1) is a size without a config; tune it first" in capsys.readouterr().err


def test_underscores_and_dashes() -> None:
    one = options.parse(
        [
            "--gemm_size_file=a_b.yaml",
            *["--num_threads", "3", "-dtype_a", "bf16", "-col_b", "--bias_vector", "--tuning_results_file", "o_o"],
        ]
    )
    other = options.parse(
        [
            "--gemm-size-file=a_b.yaml",
            *["--num-threads", "3", "-dtype-a", "bf16", "-col-b", "--bias-vector", "m", "-o", "o_o"],
        ]
    )
    assert vars(one) == vars(other)
    assert (one.gemm_size_file, one.output, one.dtype_a, one.col_b, one.bias_vector) == (
        "a_b.yaml", "o_o", "bf16", True, "m",
    )  # fmt: skip
    assert options.parse([*SIZE, "--no_warmup"]).warmup == 0 and not options.parse([*SIZE, "--no_resume"]).resume


def test_the_home_folder_is_named_as_in_a_shell(monkeypatch: Patch) -> None:
    """Also where the shell leaves it to the command, as in --tuning_results_file=~/tuned.yaml."""
    monkeypatch.setenv("HOME", "/home/someone")
    one = options.parse(["--gemm_size_file=~/s.yaml", "--tuning_results_file=~/t.yaml", "--profile_file=~/p.csv"])
    assert (one.gemm_size_file, one.output, one.profile_file) == (
        "/home/someone/s.yaml", "/home/someone/t.yaml", "/home/someone/p.csv",
    )  # fmt: skip
    assert options.parse([*SIZE, "-o", "a~b"]).output == "a~b"
