from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import shipped
from tests.support.linear_layers import TILE, problem, record
from tests.support.nouns import Capsys, Family, Groups, Patch, Problem, apart, fails, matrices, registry, results_format
from tritongemm.cli import lookup

SIZE = ("-n", "32", "-k", "64", "-dtype_a", "bf16", "--target", "sm90")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A table over M, a row of the library, a prediction, and rows of another device."""
    found = tmp_path / "tuned.yaml"
    rows = [
        record(problem(16, 32, 64), compute_units=132),
        record(problem(64, 32, 64), m_from=33, compute_units=132, held_out={"40": [0.015, 1.2], "36": [0.0, 1.4]}),
        record(problem(8, 32, 64), winner="torch"),
        record(problem(9, 32, 64), timer="model"),
        record(problem(10, 32, 64), compute_units=78),
        record(problem(10, 32, 64, bias="n")),
    ]
    found.write_text(results_format().write(rows), encoding="utf-8")
    return str(found)


def run(capsys: Capsys, *argv: str) -> tuple[int, list[str]]:
    status = lookup.main(argv)
    said = capsys.readouterr()
    return status, (said.out or said.err).splitlines()


def test_rows_are_reported_with_their_place_and_damaged_files(file: str, capsys: Capsys, tmp_path: Path) -> None:
    status, lines = run(capsys, file, "-m", "16", *SIZE)
    assert status == 0 and lines == [
        "exact: 16x32x64_bf16_TN on sm90, 132 compute units",
        f"row       {file}: row 1 (line 2)",
        f"config    {TILE.name}",
        "winner    triton",
        "time      2.00 us at M 16, 1.500x torch",
    ]
    status, lines = run(capsys, file, "-m", "50", *SIZE)
    assert status == 0 and lines[0] == "range: 50x32x64_bf16_TN on sm90, 132 compute units, M 33 to 64"
    assert lines[-1] == ("held out  M 36: 1.400x torch; M 40: 1.200x torch, 1.5% slower than the best known there")
    assert run(capsys, file, str(tmp_path / "gone.yaml"), "-m", "16", *SIZE)[0] == 2
    (tmp_path / "cut.csv").write_text("gfx,cu_num,M,N", encoding="utf-8")
    status, lines = run(capsys, str(tmp_path / "cut.csv"), "-m", "16", *SIZE)
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: ") and "cut.csv" in lines[0]


def test_a_library_that_is_wrong_there_and_the_order_of_additions_are_named(tmp_path: Path, capsys: Capsys) -> None:
    wrong = replace(
        record(problem(16, 32, 64), order="2x32", row_bits="aa"),
        library_seconds=None,
        library_wrong="error 0.5 > 0.008",
        toolchain={"torch": "2"},
    )
    (tmp_path / "tuned.yaml").write_text(results_format().write([wrong]), encoding="utf-8")
    status, lines = run(capsys, str(tmp_path / "tuned.yaml"), "-m", "16", *SIZE)
    assert status == 0 and lines[-3:] == [
        "time      2.00 us at M 16",
        "order     2x32, that of all M of the product",
        "wrong     the library at 16x32x64_bf16_TN (torch 2: error 0.5 > 0.008)",
    ]


def test_a_row_that_does_not_add_up_as_it_states_or_as_others_do_is_named(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "tuned.yaml"
    one, other = (record(problem(m, 32, 64), order=order, row_bits="aa") for m, order in ((16, "1x64"), (64, "2x32")))
    for rows, why in (
        ([one], "it states the order 1x64, and its kernel adds up in the order 2x32"),
        (
            [one, other],
            f"bf16 TN has rows of several orders of additions, so none serves: 1x64, bits aa: {path}: row 1",
        ),
    ):
        path.write_text(results_format().write(rows), encoding="utf-8")
        (line,) = (line for line in run(capsys, str(path), "-m", "16", *SIZE)[1] if line.startswith("order"))
        assert line.startswith("order     1x64, but does not serve where rows must be invariant: ") and why in line


def test_without_a_gpu_all_rows_name_the_device(file: str, tmp_path: Path, without_gpu: None, capsys: Capsys) -> None:
    words = ["-m", "16", *SIZE[:-2]]
    assert run(capsys, file, *words)[1][0] == "exact: 16x32x64_bf16_TN on sm90, 132 compute units"
    other = tmp_path / "other.yaml"
    other.write_text(results_format().write([record(problem(5, 32, 64), target="gfx950")]), encoding="utf-8")
    assert run(capsys, file, str(other), *words) == (
        1,
        ["fallback: 16x32x64_bf16_TN was tuned for sm90; the device is gfx942"],
    )


def test_rows_of_another_layout_are_named_and_looked_up(tmp_path: Path, without_gpu: None, capsys: Capsys) -> None:
    found = tmp_path / "rows.yaml"
    tuned = problem(16, 32, 64).stored(True, True)
    found.write_text(results_format().write([record(tuned, compute_units=132)]), encoding="utf-8")
    serves = "serves mm(x, b.t()) and, inside serve(), x @ b with b [K, N]; for linear layers tune with -col_b"
    words = (str(found), *SIZE[:-2])
    near = "fallback: 16x32x64_bf16_TN was never tuned for sm90; 16x32x64_bf16_TT was, which " + serves
    layout = "rows of this N x K are of layout TT, which " + serves
    assert run(capsys, *words, "-m", "16") == (1, [near]), "the layout once"
    assert run(capsys, *words, "-m", "17")[1] == ["fallback: 17x32x64_bf16_TN was never tuned for sm90", layout]
    assert run(capsys, *words, "-m", "16", "-row_b")[1][0] == "exact: 16x32x64_bf16_TT on sm90, 132 compute units"


def test_what_the_rows_of_an_n_and_k_are_of_is_named(tmp_path: Path, capsys: Capsys) -> None:
    found = tmp_path / "rows.yaml"
    four_bits = Problem(16, 32, 128, *matrices("bf16", "int4", "bf16", layout="TN"))
    rows = [
        record(Problem(16, 32, 64, *matrices("fp16", layout="TN"))),
        record(registry.get(Family, "a16w4").problem(four_bits)),
        *(record(problem(m, 32, 48)) for m in (1, 2, 4, 8, 16)),
    ]
    found.write_text(results_format().write(rows), encoding="utf-8")
    for k, of in (
        ("64", "fp16_TN"),
        ("128", "bf16-int4-bf16_TN_a16w4_weight_128"),
        ("48", "M 1, M 2, M 4, M 8 and 1 other"),
    ):
        reason = f"fallback: 17x32x{k}_bf16_TN was never tuned for sm90; rows of this N x K are of {of}"
        assert run(capsys, str(found), "-m", "17", *SIZE[:2], "-k", k, *SIZE[4:]) == (1, [reason])


def test_aiters_rows_are_said_and_serve_as_buckets(tmp_path: Path, capsys: Capsys, file: str) -> None:
    csv = tmp_path / "a8w8_blockscale_bpreshuffle_tuned_gemm.csv"
    rows = [
        "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio",
        "gfx942,80,1,1536,4096,triton,0,0,7.5,_gemm_a8w8_blockscale_kernel,1,1,0.0",
        "gfx942,80,512,1536,4096,asm,0,0,7.5,_ZN5aiter43fp8gemm_bf16_blockscale_BpreShuffle_128x128E,1,1,0.0",
    ]
    csv.write_text("\n".join(rows), encoding="utf-8")
    family = ("--family", "a8w8_blockscale_bpreshuffle", "--target", "gfx942", "--compute_units", "304")
    status, lines = run(capsys, str(csv), "-m", "1", "-n", "1536", "-k", "4096", *family)
    assert status == 1 and len(lines) == 3 and lines[0].endswith("was never tuned for gfx942")
    assert lines[1].startswith(f"{csv}: row 1 (line 2) names AITER's own kernel (libtype triton), which nothing here ")
    assert lines[2] == "all rows of this N x K are of gfx942, 80 compute units"
    csv.write_text("\n".join(rows[:2]), encoding="utf-8")
    status, (line,) = run(capsys, str(csv), "-m", "1", "-n", "1536", "-k", "4096", *family)
    assert status == 2 and line.endswith(
        "holds no tuned result: kernels that nothing here runs in 1 row, row 1 AITER's own kernel (libtype triton); "
        "tune it first"
    )
    csv = tmp_path / "bf16_tuned_gemm.csv"
    csv.write_text(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName\n"
        "gfx950,256,16,32,64,False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,4.5,native\n",
        encoding="utf-8",
    )
    asked = (str(csv), file, "-m", "13", *SIZE, "--target", "gfx950")
    status, lines = run(capsys, *asked)
    assert status == 0 and lines[0] == "bucket: 13x32x64_bf16_TN on gfx950, 256 compute units, padded M 16"
    assert lines[1] == f"row       {csv}: row 1 (line 2)" and lines[3:] == [
        "winner    torch",
        "time      4.50 us at M 16",
    ]
    status, lines = run(capsys, *asked, "--compute_units", "80")
    assert status == 1 and lines[0].startswith("fallback: 13x32x64_bf16_TN was never tuned for gfx950")


@apart(
    (("-m", "8"), 0, "exact: 8x32x64_bf16_TN"),
    (("-m", "9"), 1, "fallback: {file}: row 4 (line 5): 9x32x64_bf16_TN: its record is a prediction"),
    (("-m", "10"), 1, "fallback: 10x32x64_bf16_TN was tuned on 78 compute units; the device has 132"),
    (("-m", "10", "--compute_units", "78"), 0, "exact: 10x32x64_bf16_TN on sm90, 78 compute units"),
    (("-m", "10", "--bias-vector", "n"), 0, "exact: 10x32x64_bf16_TN_biasn"),
    (("-m", "10", "--bias-vector", "m"), 1, "fallback: 10x32x64_bf16_TN_biasm is no product that"),
    (("-m", "65"), 1, "fallback: 65x32x64_bf16_TN was never tuned for sm90; the table over M has 33 to 64"),
    ((), 2, "error: name a size with -m, -n and -k"),
)
def test_the_exit_status_says_whether_a_row_serves(
    words: tuple[str, ...], status: int, begin: str, /, file: str, capsys: Capsys
) -> None:
    found, lines = run(capsys, file, *SIZE, *words)
    assert found == status and lines[0].startswith(begin.format(file=file))


def test_rows_of_another_m_and_of_groups_serve(tmp_path: Path, capsys: Capsys) -> None:
    blocks = registry.get(Family, "a8w8_blockscale")
    found, named = tmp_path / "blocks.yaml", ("-n", "256", "-k", "512", "--family", "a8w8_blockscale")
    rows = [
        replace(record(blocks.problem(Problem(m, 256, 512, *matrices(fp8, c="bf16", layout="TN")))), target=target)
        for m in (16, 512)
        for fp8, target in (("fp8e4m3fn", "sm90"), ("fp8e4m3fnuz", "gfx942"))
    ]
    found.write_text(results_format().write(rows), encoding="utf-8")
    for target, units, m, by in (("gfx942", 304, 777, 512), ("gfx942", 304, 3, 16), ("sm90", 132, 777, 0)):
        status, lines = run(capsys, str(found), "-m", str(m), *named, "--target", target)
        assert status == (0 if by else 1), lines
        if by:
            assert lines[0].startswith("near: ") and lines[0].endswith(
                f"on {target}, {units} compute units, by the row of M {by}, as none has M {m}"
            )
            assert f"time      2.00 us at M {by}, 1.500x torch" in lines
        else:
            assert lines[0].startswith("fallback: ")
    file = tmp_path / "tuned.yaml"
    tuned = replace(problem(64, 32, 64), groups=Groups(4, spread="captured", counts=(0, 40, 14, 10)))
    file.write_text(results_format().write([record(tuned, compute_units=132)]), encoding="utf-8")
    status, lines = run(capsys, str(file), "-m", "64", *SIZE, "--groups", "4")
    assert status == 0 and lines[0].endswith("compute units, by a row whose groups had other numbers of rows")
    status, lines = run(capsys, str(file), "-m", "63", *SIZE, "--groups", "4")
    assert status == 0 and lines[0].endswith("compute units, by the row of M 64, as none has M 63")


def test_shipped_tables_are_looked_up_by_the_name_of_a_gpu(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    shipped.ship(tmp_path, monkeypatch)
    size = ("-m", "5", "-n", str(shipped.N), "-k", str(shipped.K), "-dtype_a", "bf16")
    status, lines = run(capsys, "--shipped", "h200", *size)
    assert (status, lines[0]) == (0, "range: 5x96x64_bf16_TN on sm90, 132 compute units, M 1 to 16")
    assert lines[1] == f"row       shipped tables of h200, 2026-01-02 ({shipped.LAYER})"
    assert run(capsys, "--shipped", *size)[1][1].split()[4] == "h100,"  # sm90 without a GPU has an H100's memory
    beyond = run(capsys, "--shipped", "h200", "-m", "99999", *size[2:])[1]
    assert not any("for memory of" in line for line in beyond), "there are rows of its memory"
    assert run(capsys, "--shipped", *size, "--target", "gfx942")[1][-1] == (
        "shipped rows of this N x K are for memory of 3352 and 4917 GB/s, not 5300; --shipped GPU looks in those of "
        "one GPU: h100, h200"
    )
    assert run(capsys, "--shipped", "h20", *size)[1] == [
        "error: there are no shipped tables of h20; there are: h100, h200"
    ]
    fails(SystemExit, "", lookup.main, size)
    assert "error: name files of results, or --shipped" in capsys.readouterr().err
