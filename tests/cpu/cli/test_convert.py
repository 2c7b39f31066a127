import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_rows import AITER_HEADER as HEADER
from tests.support.nouns import Capsys, Defaults, Patch, Problem, cases, each, matrices, registry, results_format, sizes
from tests.support.stores import ONE, TWO, record, rows, take
from tritongemm.cli import check, convert
from tritongemm.results import tuned_file
from tritongemm.system import locks
from tritongemm.tune.requested_run import TuningStopped, merging

SIZE = "False,torch.bfloat16,torch.bfloat16,False,False"
H200: dict[str, Any] = {"target": "sm90", "compute_units": 132}
TORCH = f"gfx942,304,16,512,4096,{SIZE},torch,0,0,9.0,native,0.0,7.46,482.42"
OTHER = f"gfx950,256,16,512,4096,{SIZE},flydsl,7,0,8.0,flydsl_bf16_x,0.0,1.0,1.0"


def written(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_results_go_both_ways_and_what_the_output_holds_stays(tmp_path: Path, capsys: Capsys) -> None:
    tuned, ours, again = tmp_path / "bf16_tuned_gemm.csv", tmp_path / "ours.yaml", tmp_path / "again_bf16_tuned.csv"
    written(tuned, HEADER, TORCH, OTHER)
    assert convert.main([str(tuned), "-o", str(ours)]) == 0
    said = capsys.readouterr()
    assert "1 of 1 results written as the YAML of our results" in said.out
    assert "kernels that nothing here runs in 1 row, row 2 " in said.err
    (row,) = sizes.from_file(ours, Defaults())
    assert row.record and (row.record.winner, row.record.compute_units, row.record.seconds) == ("torch", 304, 9e-6)
    assert convert.main([str(ours), "-o", str(again)]) == 0 and again.read_text().splitlines() == [HEADER, TORCH]
    ours, output = tmp_path / "ours.yaml", tmp_path / "bf16_tuned_gemm.csv"
    problem = Problem(16, 512, 4096, *matrices("bf16", layout="TN"))
    translated = record(problem, 9e-6, winner="torch", library="torch", library_seconds=8e-6, compute_units=304)
    ours.write_text(results_format().write([translated, record(ONE)]), encoding="utf-8")
    text = f"{HEADER}\r\n{OTHER}\r\n\r\nnonsense\r\n{TORCH}\r\n"
    output.write_bytes(text.encode())
    assert convert.main([str(ours), "-o", str(output)]) == 0
    assert output.read_bytes().decode() == text.replace("9.0,native,0.0,7.46,482.42", "8.0,native,0.0,8.39,542.72")
    said = capsys.readouterr()
    assert "1 of 2 results written" in said.out and f"not written in full: {ONE.key}: " in said.err


def test_files_are_merged_and_results_of_one_thing_reported_once(tmp_path: Path) -> None:
    one, two, output = tmp_path / "a_bf16_tuned.csv", tmp_path / "b_bf16_tuned.csv", tmp_path / "all_bf16_tuned.csv"
    written(one, HEADER, OTHER)
    written(two, HEADER, OTHER.replace("8.0", "7.0"), TORCH)
    assert convert.main([str(one), str(two), "-o", str(output)]) == 0
    assert sorted(output.read_text().splitlines()) == sorted([HEADER, OTHER.replace("8.0", "7.0"), TORCH])
    assert one.read_text() == f"{HEADER}\n{OTHER}\n", "sources stay as they are"
    before = output.read_bytes()
    assert convert.main([str(one), str(two), "-o", str(output)]) == 0 and output.read_bytes() == before
    paths = [tmp_path / f"{name}.yaml" for name in "ab"]
    for path, seconds in zip(paths, (2e-5, 1e-5), strict=True):
        path.write_text(results_format().write([record(ONE, seconds), record(TWO)]), encoding="utf-8")
    assert convert.main([*map(str, paths), "-o", str(tmp_path / "all.yaml")]) == 0
    rows = sizes.from_file(tmp_path / "all.yaml", Defaults())
    assert [row.record and row.record.seconds for row in rows] == [1e-5, 1e-5]


def test_two_orders_of_one_product_are_a_named_conflict(tmp_path: Path, capsys: Capsys) -> None:
    split, output = replace(record(ONE.at(7)), order="2x1024", row_bits="b"), tmp_path / "all.yaml"
    paths = [str(tmp_path / "unsplit.yaml"), str(tmp_path / "split.yaml")]
    for path, one in zip(paths, (replace(record(ONE), order="1x2048", row_bits="a"), split), strict=True):
        Path(path).write_text(results_format().write([one]), encoding="utf-8")
    assert convert.main([*paths, "-o", str(output)]) == 2 and not output.exists()
    named = f"several orders of additions, so none serves invariant rows: 1x2048, bits a at M {ONE.m}; 2x1024"
    assert named in capsys.readouterr().err
    output.write_text(Path(paths[0]).read_text() + results_format().write([split]).splitlines()[-1] + "\n")
    assert check.main([str(output)]) == 1 and named in capsys.readouterr().err


@each("first", ["range.yaml", "exact.yaml"])
def test_a_range_of_m_is_not_lost_to_a_faster_result_of_its_largest(tmp_path: Path, capsys: Capsys, first: str) -> None:
    """Which would leave all other M of the range without a kernel."""
    facts: dict[str, Any] = {**H200, "timer": "events"}
    of_range, exact = record(ONE, 9e-6, m_from=1, **facts), record(ONE, 8e-6, **facts)
    for name, one in (("range.yaml", of_range), ("exact.yaml", exact)):
        (tmp_path / name).write_text(results_format().write([one]), encoding="utf-8")
    names = [first, *({"range.yaml", "exact.yaml"} - {first})]
    paths, output = [str(tmp_path / name) for name in names], tmp_path / "out.yaml"
    assert convert.main([*paths, "-o", str(output)]) == 0
    (row,) = sizes.from_file(output, Defaults())
    assert row.record is not None and (row.record.m_from, row.record.seconds) == (1, 9e-6)
    assert "that of the range is kept" in capsys.readouterr().err
    convert.main([str(output), "-o", str(tmp_path / "bf16_tuned_gemm.csv")])
    assert "1 results serve ranges of M, which AITER's CSV" in capsys.readouterr().err


@each("held", [None, f"{HEADER}\n{OTHER}\n"])
def test_no_written_result_is_no_success(held: str | None, tmp_path: Path, capsys: Capsys) -> None:
    """A script that goes on with the file must not take one for it that holds nothing of these results."""
    ours, output = tmp_path / "ours.yaml", tmp_path / "bf16_tuned_gemm.csv"
    ours.write_text(results_format().write([record(ONE)]), encoding="utf-8")
    if held is not None:
        output.write_text(held, encoding="utf-8")
    assert convert.main([str(ours), "-o", str(output)]) == 2
    said = capsys.readouterr()
    assert f"not written in full: {ONE.key}: " in said.err and not said.out
    assert "none of 1 results could be written as AITER's CSV" in said.err
    assert (output.read_text(encoding="utf-8") if output.exists() else None) == held


def test_what_aiter_says_of_its_kernels_goes_both_ways(tmp_path: Path) -> None:
    """AITER's own number of a kernel, and the share of elements that it found wrong, from its own table."""
    tuned, ours = tmp_path / "a8w8_bpreshuffle_tuned_gemm.csv", tmp_path / "ours.yaml"
    head = "gfx,cu_num,M,N,K,q_dtype_w,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    kernel = "_ZN5aiter41I8gemm_bf16_perTokenI8_BpreShuffle_16x128E"
    size = "gfx942,80,128,128,5120,torch.int8,asm"
    written(tuned, head, f"{size},7,8,7.3189,{kernel},22.92,183.56,0.182")
    assert convert.main([str(tuned), "-o", str(ours)]) == 0
    assert convert.main([str(ours), "-o", str(ours)]) == 0, "our own file keeps them"
    tuned.unlink()
    assert convert.main([str(ours), "-o", str(tuned)]) == 0
    assert tuned.read_text().splitlines()[1].startswith(f"{size},7,8,7.3189,{kernel},")
    assert tuned.read_text().splitlines()[1].endswith(",0.182")
    text = ours.read_text(encoding="utf-8")
    assert text.count("0.182") == 1
    for wrong in (".inf", "[1]", "2.5", "'a,b'", "true"):
        ours.write_text(text.replace("0.182", wrong), encoding="utf-8")
        tuned.unlink()
        assert convert.main([str(ours), "-o", str(tuned)]) == 0
        assert tuned.read_text().splitlines()[1].endswith(",0.0"), wrong


def test_bad_input_costs_nothing_that_is_there(tmp_path: Path, capsys: Capsys) -> None:
    tuned, ours = tmp_path / "bf16_tuned_gemm.csv", tmp_path / "ours.yaml"
    written(tuned, HEADER, TORCH, TORCH.replace(",512,", ",none,"))
    ours.write_text(results_format().write([record(ONE)]), encoding="utf-8")
    bare = written(tmp_path / "sizes.csv", "M,N,K", "1,2,3")
    before = ours.read_bytes()
    for words, status, complaint in (
        ([str(tuned), "-o", str(ours)], 2, "holds results; name it among the files too"),
        (
            [str(tuned), "-o", str(tmp_path / "x.json")],
            2,
            "several formats may be meant; name one by --to: inductor_lookup",
        ),
        (
            [str(tuned), "-o", str(tmp_path / "x.odd")],
            2,
            "none of the formats that can hold results is meant; name one",
        ),
        ([str(tuned), "-o", str(tmp_path / "x.csv"), "--to", "tune_gemm"], 2, "can't hold results; these can: "),
        ([str(tuned), "-o", str(tmp_path / "tunableop_results0.csv")], 2, "let TunableOp write it first"),
        (
            [str(tuned), "-o", str(tmp_path / "x.csv"), "--to", "vllm"],
            2,
            "did you mean vllm_batch_invariant or vllm_dense_json or vllm_moe_json?",
        ),
        ([str(tmp_path / "absent.csv"), "-o", str(tmp_path / "x.yaml")], 2, "absent.csv: there is no such file"),
        ([bare, "-o", str(tmp_path / "x.yaml")], 2, "those of several families; name one with --family"),
        ([str(tuned), str(ours), "-o", str(ours)], 1, "row 2 (line 3) N must be a whole number"),
    ):
        assert convert.main(words) == status, words
        assert complaint in capsys.readouterr().err
        if status == 2:
            assert ours.read_bytes() == before and not list(tmp_path.glob("x.*"))
    assert len(sizes.from_file(ours, Defaults())) == 2


@cases(
    ("a8w8_blockscale_tuned_gemm.csv", (), ["M,N,K,libtype", "64,2112,7168"]),
    ("a8w8_blockscale_bpreshuffle_tuned_gemm.csv", (), ["M,N,K,libtype", "32,2112,7168"]),
    ("a8w8_tuned_gemm.csv", (), ["M,N,K,q_dtype_w", "16,2112,7168"]),
    ("bf16_tuned_batched_gemm.csv", (), ["B,M,N,K", "8,8,2112,7168"]),
    ("mine.csv", ("--to", "aiter", "--family", "a8w8_blockscale"), ["M,N,K,libtype", "64,2112,7168"]),
    ("tuned_fmoe.csv", (), []),
)
def test_a_file_is_of_the_family_that_its_name_says(
    name: str, flags: tuple[str, ...], translated: list[str], /, tmp_path: Path, capsys: Capsys
) -> None:
    """Files of two families have the same columns, and a kernel of one reads the other's B as other numbers."""
    problems = [
        _problem("a8w8_blockscale", 64), _problem("a8w8_blockscale_bpreshuffle", 32), _problem("a8w8", 16),
        _problem("a8w8", 17), _problem("dense", 8, batch=8),
    ]  # fmt: skip
    ours, output = tmp_path / "ours.yaml", tmp_path / name
    ours.write_text(results_format().write([record(one, **H200) for one in problems]), encoding="utf-8")
    assert convert.main([str(ours), "-o", str(output), "--verbose", *flags]) == (0 if translated else 2)
    lines = [line.partition(",")[2].partition(",")[2] for line in _lines(output)]
    assert [line[: len(start)] for line, start in zip(lines, translated, strict=False)] == translated
    assert len(lines) == (len(translated) + (name == "a8w8_tuned_gemm.csv"))
    assert capsys.readouterr().err.count("the file is of AITER's family") == len(problems) - max(0, len(lines) - 1)
    again = tmp_path / "again.yaml"
    again.write_text(results_format().write([record(problems[1], 1e-6, **H200)]), encoding="utf-8")
    is_written = name == "a8w8_blockscale_bpreshuffle_tuned_gemm.csv"
    assert convert.main([str(again), "-o", str(output), *flags]) == (0 if is_written else 2)
    assert len(_lines(output)) == len(lines)


def _problem(family: str, m: int, **given: Any) -> Problem:
    found, typical = registry.family_of(family)
    types = ("bf16",) * 3 if family == "dense" else ("fp8e4m3fn", "fp8e4m3fn", "bf16")
    return found.problem(
        Problem(
            m, 2112, 7168, *matrices(*types, layout="TN", order=typical.b.order, shared=given.pop("shared", "")),
            **given,
        )
    )  # fmt: skip


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_files_without_a_result_make_no_empty_one(tmp_path: Path, capsys: Capsys) -> None:
    """As where the name of the output says another format than that of the files to merge."""
    source = written(tmp_path / "a_bf16_tuned.csv", HEADER, OTHER)
    assert convert.main([source, "-o", str(tmp_path / "merged.yaml")]) == 2
    translated = capsys.readouterr().err
    assert "no result that can be written as the YAML of our results" in translated and "which --to names" in translated
    assert not (tmp_path / "merged.yaml").exists()
    assert convert.main([source, "-o", str(tmp_path / "merged.csv"), "--to", "aiter"]) == 0


def test_merges_at_once_lose_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Each reads what the one before has written, however long that takes."""
    output, write = tmp_path / "all_bf16_tuned.csv", tuned_file.write

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return write(*args, **named)

    monkeypatch.setattr(tuned_file, "write", slowly)
    rows = [OTHER.replace(",16,512", f",{m},512") for m in (16, 32, 48)]
    merges = []
    for number, row in enumerate(rows):
        source = written(tmp_path / f"{number}_bf16_tuned.csv", HEADER, row)
        merges.append(threading.Thread(target=convert.main, args=([source, "-o", str(output)],)))
        merges[-1].start()
    for merge in merges:
        merge.join()
    assert sorted(output.read_text().splitlines()) == sorted([HEADER, *rows])
    with tuned_file.held(output), monkeypatch.context() as patch:
        patch.setattr(locks, "_LOCK_SECONDS", 0.01)
        assert convert.main([str(tmp_path / "0_bf16_tuned.csv"), "-o", str(output)]) == 2


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C is heeded, wherever the tests run."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only a main thread handles signals")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@each("ended", [KeyboardInterrupt, ValueError, None])
def test_ctrl_c_ends_no_merge(tmp_path: Path, monkeypatch: Patch, ended: type[BaseException] | None) -> None:
    """It comes while the file is being replaced, after a run that was stopped, failed or came to its end."""
    path, profiles = tmp_path / "out.yaml", []
    with take(path) as store:
        replace = os.replace

        def interrupted(old: Path, new: Path) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            replace(old, new)

        monkeypatch.setattr(os, "replace", interrupted)
        try:
            with merging(store, [ONE], lambda: profiles.append(1)):
                store.add_record(record(ONE))
                if ended:
                    raise ended
        except (KeyboardInterrupt, ValueError) as error:
            assert type(error) is (TuningStopped if ended is KeyboardInterrupt else ended)
    assert rows(path) == [record(ONE)] and bool(profiles) is (ended is not ValueError)
