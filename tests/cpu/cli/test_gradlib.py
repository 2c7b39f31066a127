from pathlib import Path

import pytest

from tests.support import raising
from tests.support.evaluators import passed
from tests.support.foreign_rows import AITER_HEADER as TUNED
from tests.support.nouns import Capsys, Defaults, InputError, MeasureProtocol, Patch, apart, fails, loader, refuses
from tritongemm.cli import gradlib, shell, tune
from tritongemm.hip_ext import machine
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.report.console import Reporter
from tritongemm.results.tuned_file import TunedFile
from tritongemm.tune import requested_rows, requested_run
from tritongemm.tune.request import Devices, ModelSource, Outputs, SearchScope, SizeSource, TuneRequest
from tritongemm.workloads import sizes

HEADER = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"
LINE = "16,64,64,False,torch.bfloat16,torch.bfloat16,False,False"


@pytest.fixture
def untuned(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bf16_untuned_gemm.csv"
    path.write_text(f"{HEADER}\n{LINE}\n\n{LINE}\n8, 64,64,FALSE,torch.bfloat16,torch.bfloat16, False,False\n")
    return path


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: Patch) -> list[TuneRequest]:
    monkeypatch.chdir(tmp_path)
    called: list[TuneRequest] = []

    def take(request: TuneRequest, *_: object) -> int:
        called.append(request)
        return 0

    monkeypatch.setattr(tune, "run", take)
    monkeypatch.setattr(machine, "count_devices", lambda: 8)
    return called


def test_defaults_are_theirs(untuned: Path, requests: list[TuneRequest]) -> None:
    assert gradlib.main(["--input_file", str(untuned)]) == 0
    (asked,) = requests
    assert (asked.outputs, asked.sizes.path) == (Outputs(Path("bf16_tuned_gemm.csv")), untuned)
    assert asked.protocol == MeasureProtocol(err_ratio=0.05, warmup=5, iters=101)
    assert (asked.devices, asked.timeout_s, asked.search.libtype) == (Devices(ngpus=8), 60, None)


def test_every_flag_has_its_meaning(untuned: Path, requests: list[TuneRequest]) -> None:
    flags = "-o t_bf16_tuned.csv -o2 p.csv --mp 2 --batch 100 --all --sort True --errRatio 0.01 --libtype asm,hipblaslt"
    more = "--warmup 3 --iters 7 --timeout 1800 --budget 90s -v -k --family a8w8"
    assert gradlib.main(["-i", str(untuned), *flags.split(), *more.split()]) == 0
    (asked,) = requests
    assert asked.outputs == Outputs(Path("t_bf16_tuned.csv"), "aiter", candidates=Path("p.csv"), resume=False)
    assert asked.protocol == MeasureProtocol(err_ratio=0.01, warmup=3, iters=7)
    assert (asked.devices.ngpus, asked.timeout_s, asked.sizes.defaults.family) == (2, 1800, "a8w8")
    assert asked.search == SearchScope(budget=(0, 90), libtype="asm,hipblaslt")


@apart(
    ("a4w4_blockscale", "a4w4_blockscale_untuned_gemm.csv", "a4w4_blockscale_tuned_gemm.csv", 1),
    ("a4w4_bpreshuffle", "a4w4_blockscale_untuned_gemm.csv", "a4w4_blockscale_tuned_gemm.csv", 1),
    ("a8w8_blockscale", "a8w8_blockscale_untuned_gemm.csv", "a8w8_blockscale_tuned_gemm.csv", 1),
    ("batched_bf16", "bf16_untuned_batched_gemm.csv", "bf16_tuned_batched_gemm.csv", 1),
    ("fmoe", "untuned_fmoe.csv", "tuned_fmoe.csv", 1),
    ("bf16", "bf16_untuned_gemm.csv", "bf16_tuned_gemm.csv", 0),
)
def test_a_family_has_its_own_files_and_splits_where_k_asks(
    family: str, untuned: str, tuned: str, most: int, /, requests: list[TuneRequest]
) -> None:
    assert gradlib.main(["--family", family, "--sort", "--batch", "50"]) == 0
    (asked,) = requests
    assert (asked.sizes.path, asked.outputs.path) == (Path(untuned), Path(tuned))
    assert asked.search.max_split == most and asked.timeout_s == 60
    assert gradlib.main(["--family", family, "-k"]) == 0 and requests[-1].search.max_split == 0


@pytest.mark.usefixtures("without_gpu")
def test_a_family_that_the_target_can_not_compute(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a4w4_blockscale_untuned_gemm.csv").write_text("M,N,K\n128  ,1536 ,7168\n")
    assert gradlib.main(["--family", "a4w4_blockscale", "--target", "sm80"]) == 2
    said = capsys.readouterr().err
    assert "row 1 (line 2): 128x1536x7168_fp4e2m1" in said and "sm80 computes the families a" in said


@pytest.mark.usefixtures("without_gpu")
def test_rows_of_other_targets_are_left_out(tmp_path: Path, capsys: Capsys) -> None:
    """As in the files that AITER ships, which hold both encodings of fp8; a row that no target computes is refused."""
    path, gfx942 = tmp_path / "a8w8_untuned_gemm.csv", loader.load_target("gfx942")
    lines = ["M,N,K,q_dtype_w", "16,64,64,torch.int8", *(f"{m},64,64,torch.float8_e4m3fn" for m in (1, 2))]
    path.write_text("\n".join(lines))
    source = SizeSource(path=path)
    with Reporter(verbose=False) as reporter:
        kept = requested_rows.select(sizes.from_file(path, Defaults()), gfx942, source, reporter)
        assert [row.problem.a.dtype for row in kept] == ["int8"]
        reported = capsys.readouterr().err
        assert "left out, as another target computes it, and 1 others: " in reported and "row 2 (line 3)" in reported
        path.write_text("\n".join([lines[0], *lines[2:]]))
        with pytest.raises(InputError, match=r"row 1 .line 2.: 1x64x64_fp8e4m3fn.*encoding is fnuz"):
            requested_rows.select(sizes.from_file(path, Defaults()), gfx942, source, reporter)
        path.write_text("\n".join([*lines, "16,64,64,torch.bfloat16"]))
        with pytest.raises(InputError, match=r"row 4 .line 5.*multiplies fp8 by fp8 or int8 by int8"):
            requested_rows.select(sizes.from_file(path, Defaults()), gfx942, source, reporter)


def test_files_may_be_called_anything_where_the_family_is_said(requests: list[TuneRequest], tmp_path: Path) -> None:
    """As in the guide of CK's A4W4 tuner."""
    files = [tmp_path / name for name in ("sizes.csv", "best", "all.csv")]
    flags = [word for flag, path in zip(("-i", "-o", "-o2"), files, strict=True) for word in (flag, str(path))]
    assert gradlib.main([*flags, "--family", "a4w4_blockscale", "-k"]) == 0
    (asked,) = requests
    assert [asked.sizes.path, asked.outputs.path, asked.outputs.candidates] == files and asked.outputs.to == "aiter"
    reported = TunedFile.find(files[1], "aiter")
    assert reported is not None and (reported.place, reported.results) == (tmp_path / "best", tmp_path / "best.yaml")
    files[1].write_text("a letter\n")
    refuses("is there and is not AITER's CSV", TunedFile.find, files[1], "aiter")


def test_sizes_of_a_model_are_handed_on(requests: list[TuneRequest]) -> None:
    flags = "--model_dir /models/m --tp 8 --nsets 1,16 --batch_size 2 --indtype bf16 --outdtype f32 --all_bias"
    assert gradlib.main(flags.split()) == 0
    (asked,) = requests
    assert asked.sizes.model == ModelSource(Path("/models/m"), 8, (2, 32), every_bias=True)
    assert (asked.sizes.defaults.a.dtype, asked.sizes.defaults.c.dtype) == ("bf16", "fp32")
    assert asked.outputs.path == Path("bf16_tuned_gemm.csv")


def test_a_family_that_there_is_not_is_the_complaint(requests: list[TuneRequest], capsys: Capsys) -> None:
    fails(SystemExit, "", gradlib.main, ["--family", "a4w4"])
    said = capsys.readouterr().err
    assert not requests and "no family is called 'a4w4'; there are: a" in said
    assert (
        "; names from other tools' files: bf16, batched_a8w8, batched_a8w8_blockscale_mxscale, batched_bf16, " in said
    )


def test_a_run_that_is_stopped_says_how_to_continue(untuned: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """With the same command, but for what would start over."""
    monkeypatch.setattr(requested_run, "tune", raising(requested_run.TuningStopped(Path("some.yaml.journal"))))
    assert gradlib.main(["-i", untuned.name, "--all", "--sort"]) == shell.INTERRUPTED
    reported = capsys.readouterr().err
    assert "stopped; what is done is in some.yaml.journal. Go on with:" in reported
    assert f"\n  python -m tritongemm gradlib -i {untuned.name} --sort\n" in reported


def test_types_and_biases_go_before_the_files(untuned: Path, requests: list[TuneRequest]) -> None:
    assert gradlib.main(["-i", str(untuned), "--indtype", "f16", "--all_bias"]) == 0
    lines = Path("bf16_tuned_gemm_sizes.csv").read_text().splitlines()
    half = "torch.float16,torch.float16,False,False"
    assert lines == [HEADER, *(f"{m},64,64,{bias},{half}" for m in (16, 8) for bias in (False, True))]
    assert requests[0].sizes.path == Path("bf16_tuned_gemm_sizes.csv")


def test_an_output_of_any_name_is_of_the_inputs_family(untuned: Path, requests: list[TuneRequest]) -> None:
    assert gradlib.main(["-i", str(untuned), "-o", "t.csv"]) == 0
    (asked,) = requests
    assert (asked.outputs.path, asked.outputs.to, asked.sizes.defaults.family) == (Path("t.csv"), "aiter", "bf16")


def test_columns_in_any_order_keep_their_cells(untuned: Path, requests: list[TuneRequest]) -> None:
    """Also where a spreadsheet has put blanks and quotes; the command may then be given again."""
    untuned.write_text(
        'cu_num , N,M ,K,bias,dtype ,outdtype\n"a,b",64 ,16,64, False,torch.bfloat16,torch.float32\n,,,\n'
    )
    for _ in range(2):
        assert gradlib.main(["-i", str(untuned), "--indtype", "f16", "--family", "bf16"]) == 0
        lines = Path("bf16_tuned_gemm_sizes.csv").read_text().splitlines()
        assert lines == ["cu_num,N,M,K,bias,dtype,outdtype", '"a,b",64,16,64,False,torch.float16,torch.float16']


@apart(
    ("", "name either a file of sizes with -i, or a model with --model_dir"),
    ("-i a.csv --model_dir m", "name either a file"),
    ("-i a.csv -o out.csv", "name its family, as in --family bf16"),
    ("-i a.csv -o out.yaml --family a8w8", "-o out.yaml is not called as a file of AITER's"),
    ("-i bare_a4w4.csv -o a4w4_tuned.csv --indtype bf16", "has no column dtype, outdtype that --indtype"),
    ("-i bf16_long.csv --indtype bf16", "line 2 has 9 values for 8 columns"),
    ("-i bf16_short.csv --indtype bf16", "line 3 has 3 values for 8 columns"),
    ("-i bf16_long.csv --nsets 16", "--nsets needs --model_dir"),
)
def test_what_is_not_meant(
    flags: str, said: str, /, untuned: Path, requests: list[TuneRequest], capsys: Capsys
) -> None:
    Path("bare_a4w4.csv").write_text("M,N,K\n1,2,3\n")
    Path("bf16_long.csv").write_text(f"{HEADER}\n{LINE},7\n")
    Path("bf16_short.csv").write_text(f"{HEADER}\n{LINE}\n16,64,64\n")
    assert gradlib.main(flags.split()) == 2 and not requests and said in capsys.readouterr().err


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.filterwarnings("ignore:.*repeat others")
def test_a_run_keeps_other_rows_and_skips_those_of_the_file(untuned: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """A prediction is no time to write: our own file has it, and the CSV stays as it was, sorted as asked."""
    there = [
        TUNED,
        "gfx942,304,8,64,64,False,torch.bfloat16,torch.bfloat16,False,False,flydsl,3,0,5.1,flydsl_x,0.0,0.1,0.2",
        "gfx1100,96,8,64,64,False,torch.bfloat16,torch.bfloat16,False,False,flydsl,3,0,5.1,flydsl_x,0.0,0.1,0.2",
    ]
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    tuned = Path("bf16_tuned_gemm.csv")
    tuned.write_text("\n".join(there) + "\n")
    flags = ["-i", str(untuned), "--target", "gfx1100", "--libtype", "triton", "--sort", "True", "--budget", "1"]
    assert gradlib.main(flags) == 0
    said = capsys.readouterr()
    assert "1 of 2 sizes are not tuned: bf16_tuned_gemm.csv has them already" in said.err
    assert "16x64x64_bf16_TN: its time is a prediction" in said.err
    assert tuned.read_text().splitlines() == [there[0], there[2], there[1]]
    (row,) = sizes.from_file(Path("bf16_tuned_gemm.yaml"), Defaults())
    assert row.problem.m == 16 and row.record and row.record.predicted
