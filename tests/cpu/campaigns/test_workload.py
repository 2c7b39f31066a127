from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.support.call_logs import extended, grouped, hipblaslt_trace, line, trace
from tests.support.nouns import InputError, load_target, refuses
from tritongemm.campaigns.column_major import as_call, as_problem
from tritongemm.campaigns.log_file import LogFile
from tritongemm.campaigns.workload import JobWorkload, read_workload

GFX950, GFX942, SM90 = (load_target(name) for name in ("gfx950", "gfx942", "sm90"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "hipblaslt.log"


def read(log: Path, text: str) -> JobWorkload:
    log.write_text(text)
    return read_workload(LogFile(log), GFX950)


def counts(workload: JobWorkload) -> dict[str, float]:
    return {p.problem.key if p.problem else p.reason: p.count for p in workload.products}


def test_processes_runs_and_rows_that_differ_in_what_changes_nothing_add_up(log: Path) -> None:
    text = f"loading\n(rank 1) {line(count=3)}{line(n=113)}[rank0]: {line(count=4)}"
    entire = read(log, text)
    assert counts(entire) == {"109x16032x16384_bf16_TN": 7, "113x16032x16384_bf16_TN": 1}
    assert entire.remarks == () and entire.products[0].line == 2
    assert counts(read(log, text + text)) == {"109x16032x16384_bf16_TN": 14, "113x16032x16384_bf16_TN": 2}
    found = read(log, line(count=2) + line(count=3, lda=16384, n=109, d="bf16_r") + line(n=1, ldb=4) + line(n=1))
    assert counts(found) == {"109x16032x16384_bf16_TN": 5, "1x16032x16384_bf16_TN": 2}


def test_two_kinds_of_lines_count_a_call_once(log: Path) -> None:
    """With masks 32 and 64 together the library states each call twice."""
    found = read(log, line("bench") * 5 + line(count=5) + extended(count=5, n=113) + line("rocblas_bench", n=7))
    assert counts(found) == {
        "109x16032x16384_bf16_TN": 5, "113x16032x16384_bf16_TN": 5, "7x16032x16384_bf16_TN": 1,
    }  # fmt: skip
    (remark,) = found.remarks
    assert "hipblaslt-bench and hipBLASLt's profile have the same calls" in remark


def test_cut_lines_and_wrong_values_are_named_and_many_counted(log: Path) -> None:
    tail = line()[200:]
    found = read(log, line() + line(n=113)[:250] + "\n" + tail + line("bench")[:150])
    assert counts(found) == {"109x16032x16384_bf16_TN": 1}
    assert [remark.split(": ")[1] for remark in found.remarks] == ["line 2", "line 3", "line 4"]
    assert f"{log}: line 2: the row is cut" in found.remarks[0]
    found = read(log, line() + (line()[:100] + "\n") * 20)
    assert len(found.remarks) == 6 and "15 other lines are not counted, the last of them line 21" in found.remarks[-1]
    found = read(
        log, line() + line().replace("K: 16384", "K: 1e9") + line(trans_a="Q") + line(batch=0) + line(count="x")
    )
    assert [remark.split(f"{log}: ")[1][:40] for remark in found.remarks] == [
        "line 2: K must be a whole number of at l",
        "line 3: transA must be N, T or C, not 'Q",
        "line 4: batch_count must be a whole numb",
        "line 5: call_count must be a whole numbe",
    ]


def test_functions_that_are_no_gemm_are_counted_and_other_lines_cost_themselves(log: Path) -> None:
    gemv = "- { rocblas_function: \"rocblas_dgemv\", transA: 'T', M: 4, N: 4, lda: 4, call_count: 12 }\n"
    found = read(log, gemv + line("rocblas", count=3) + "./rocblas-bench -f axpy -n 5 --incx 1\n")
    assert counts(found) == {"109x16032x16384_bf16_TN": 3}
    assert found.remarks == (
        f"{log}: 13 calls of other functions are not counted, nor is their time: rocblas_dgemv, axpy",
    )
    refuses(r"holds no product that can be read; .*12 calls of other functions", read, log, gemv)
    found = read(log, line(n=16) + line(n=32).replace("function:", "function::"))
    assert len(found.products) == 1
    assert any("line 2: the row has no function that can be read" in one for one in found.remarks)
    found = read(log, line() + '- {"M": 8, "N": 64, "K": 32, "count": 3}\n' * 2)
    assert len(found.products) == 1
    assert any("line 2 is of a file of sizes, as are 1 others; they are not counted" in one for one in found.remarks)
    log.write_bytes(b"\xff\xfe\x00garbage\n" + line().encode() + b"\x80\n")
    assert counts(read_workload(LogFile(log), GFX950)) == {"109x16032x16384_bf16_TN": 1}


def test_what_a_command_leaves_out_is_at_its_benchmarks_default(log: Path) -> None:
    """Unless it is cut; the sizes have defaults too, which no one who pastes a command means."""
    text = (
        "hipblaslt-bench --a_type bf16_r --b_type bf16_r --d_type bf16_r -m 64 -n 32 -k 16 --compute_type f32_r\n"
        "hipblaslt-bench -m 64 -n 32 -k 16 --transA T\nhipblaslt-bench -n 32 -k 16 -r bf16_r\n"
        "rocblas-bench -f gemm_ex -m 64 -n 32 -k 16\nhipblaslt-bench -m 64 -n 32 -k 16"
    )
    found = read(log, text)
    entire = "it multiplies full float32; here their products are of tf32"
    assert counts(found) == {"32x64x16_bf16_TT": 1, "32x64x16_fp16_TN": 1, entire: 1}
    faults, cut, assumed = found.remarks
    assert "line 3: it has no M" in faults and "line 5: the command is cut" in cut
    assert assumed.startswith(f"{log}: commands do not say all; the benchmark's defaults are taken: transA N in 2")
    assert "a_type f16_r in 1" in assumed and "a_type f32_r in 1" in assumed


def test_functions_without_a_d_write_into_c(log: Path) -> None:
    """Batches too: rocBLAS's gemm and gemm_strided_batched have no D."""
    where = "lda: 128, stride_a: 4096, ldb: 64, stride_b: 2048, beta: 0, ldc: 128, stride_c: 8192, batch_count: 12"
    profile = f"transA: 'N', transB: 'T', M: 128, N: 64, K: 32, alpha: 1, {where}, call_count: 7 }}\n"
    command = "--transposeA N --transposeB T -m 64 -n 64 -k 32 --lda 64 --stride_a 2048 --ldb 64 --stride_b 2048"
    found = read(
        log,
        f'- {{ rocblas_function: "rocblas_hgemm_strided_batched", {profile}'
        f'- {{ rocblas_function: "rocblas_hgemm_strided_batched", {profile.replace("c: 8192", "c: 9000")}'
        f"./rocblas-bench -f gemm_strided_batched -r h {command} --ldc 64 --stride_c 4096 --batch_count 12\n",
    )
    assert counts(found) == {
        "64x128x32_fp16_NT_batch12": 7,
        "the products of D are 9000 elements apart, of which one has 8192": 7,
        "64x64x32_fp16_NT_batch12": 1,
    }


@pytest.mark.parametrize(("form", "count"), [("profile", 3), ("bench", 1)])
def test_grouped_products_have_their_share(log: Path, form: str, count: int) -> None:
    """Each of a group's products by itself; nothing is computed for those without rows."""
    found = read(log, grouped(form, (32, 16), (32, 0), (32, 7), (32, 16)) + grouped(form, (8, 9)) + line(n=5))
    others = {(p.call.m, p.call.n, p.call.k): p.count for p in found.products if p.problem is None}
    assert others == {(32, 16, 64): 2 * count, (32, 7, 64): count, (8, 9, 64): count} and not found.remarks
    assert {p.reason for p in found.products} == {"", "it asks for grouped_gemm true"}
    (cut,) = read(log, grouped(form, (32, 16), (8, 9)).replace("lda", "bias", 1) + line(n=5)).remarks
    assert "line 1: the " in cut and "does not say as many sizes of each kind for its groups" in cut


def test_newer_formats_of_scales_and_another_architecture_are_reported(log: Path) -> None:
    assert counts(read(log, line(a="f4_r", scale=4))) == {
        "it scales by the format 4, and does not say how the factors are stored": 1
    }
    log.write_text("Device ID 0 : AMD Instinct MI300X gfx942:sramecc+:xnack-\n" + line() + line(a="f8_fnuz_r"))
    here, there = read_workload(LogFile(log), GFX942), read_workload(LogFile(log), GFX950)
    assert here.remarks == () and len(counts(here)) == 2
    assert there.remarks == (f"{log}: line 1 names gfx942, and this campaign tunes for gfx950",)
    assert "gfx950 has no matrix instruction for fp8e4m3fnuz" in there.products[1].reason
    assert there.products[1].problem is None and there.products[1].call.types[0] == "f8_fnuz_r"


@pytest.mark.parametrize("form", ["profile", "bench"])
def test_batches_by_pointers_are_anywhere(log: Path, form: str) -> None:
    reported = {"profile": ("batch_count: 4", ", batch_mode: "), "bench": ("--batch_count 4", " --batch_mode ")}
    count, mode = reported[form]
    lines = [line(form, n=n, batch=4).replace(count, f"{count}{mode}{number}") for n, number in ((1, 1), (2, 0))]
    assert counts(read(log, "".join(lines))) == {"it asks for batch_mode 1": 1, "2x16032x16384_bf16_TN_batch4": 1}


def test_8_bit_floats_are_read_as_the_target_computes(log: Path) -> None:
    """hipBLASLt writes f8_r on an MI300X too, whose encoding is another; PyTorch and newer versions name that one."""
    log.write_text(line(a="f8_r", scale=1) + line(a="f8_fnuz_r", scale=1, count=2) + line("bench", n=8, a="bf8_r"))
    scaled = "109x16032x16384_fp8e4m3%s-fp8e4m3%s-bf16_TN_a8w8_tensor"
    assert counts(read_workload(LogFile(log), GFX942)) == {
        scaled % ("fnuz", "fnuz"): 3, "8x16032x16384_fp8e5m2fnuz-fp8e5m2fnuz-bf16_TN": 1,
    }  # fmt: skip
    there = read_workload(LogFile(log), GFX950)
    assert next(p.problem.key for p in there.products if p.problem) == scaled % ("fn", "fn")
    assert "gfx950 has no matrix instruction for fp8e4m3fnuz" in there.products[1].reason


def test_cublaslt_s_trace(log: Path) -> None:
    scaled = "transa=OP_T aScalePointer=0x32ee30200 bScalePointer=0x32ee30000 dScalePointer=0x7f "
    texts = [
        trace(),
        trace(compute="", a="rows=16032 cols=16384 ld=16032"),
        trace(compute="transa=OP_T epilogue=EPILOGUE_BIAS biasPointer=0x7fb506003280 "),
        trace(type="R_8F_E4M3", compute=scaled),
        trace(compute="transa=OP_T epilogue=EPILOGUE_GELU_BIAS biasPointer=0x1 "),
        trace(type="R_8F_E4M3", compute=scaled + "aScaleMode=VEC32_UE8M0 bScaleMode=VEC32_UE8M0 "),
        trace(type="R_8F_E4M3", compute=scaled + "aScaleMode=BLK128x128_32F bScaleMode=VEC128_32F "),
        trace(type="R_8F_E4M3", compute=scaled + "aScaleMode=VEC128_32F bScaleMode=VEC128_32F "),
        trace(type="R_8F_E4M3", compute=scaled + "aScaleMode=VEC128_32F bScaleMode=BLK128x128_32F "),
        trace(a="rows=16384 cols=16032 ld=16384 order=ORDER_ROW"),
        trace().replace("beta=0", "beta=?"),
        trace(compute="transa=OP_T newField=4 "),
    ]
    log.write_text("".join(texts))
    found = read_workload(LogFile(log), SM90)
    assert [p.problem.key if p.problem else p.reason for p in found.products] == [
        "109x16032x16384_bf16_TN", "109x16032x16384_bf16_TT", "109x16032x16384_bf16_TN_biasn",
        "109x16032x16384_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_tensor", "it applies gelu_bias",
        "it scales by block, and does not say how the factors are stored",
        "109x16032x16384_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale",
        "109x16032x16384_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale_group",
        "it scales A by 1x128 and B by 128x128", "it asks for A: order=ORDER_ROW", "its beta is on the device",
        "it asks for newField=4",
    ]  # fmt: skip
    assert not found.remarks
    for one in found.products:
        assert one.problem is None or as_problem(as_call(one.problem)) == one.problem, "the way there and back"


def test_pointers_of_a_trace_do_not_distinguish_calls(log: Path) -> None:
    """But for those that point nowhere: such an operand has no factor."""
    given, none = (
        f"transa=OP_T aScalePointer={a} bScalePointer={b} " for a, b in (("0x32e0", "0X10"), ("0x0", "0X00"))
    )
    lines = [trace(type="R_8F_E4M3", compute=one) for one in (given, given.replace("32e0", "7f32"), none)]
    log.write_text("".join(lines))
    assert list(counts(read_workload(LogFile(log), SM90)).items()) == [
        ("109x16032x16384_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_tensor", 2),
        ("109x16032x16384_fp8e4m3fn-fp8e4m3fn-bf16_TN", 1),
    ]


def test_hipblaslt_s_trace(log: Path) -> None:
    """It has names of its own for batches, the type of a bias, types of sums, and a vector of factors."""
    texts = [
        hipblaslt_trace(),
        hipblaslt_trace(batch="8"),
        hipblaslt_trace(epilogue="EPILOGUE_BIAS biasPointer=0x7f biasType=R_16F"),
        hipblaslt_trace(compute="COMPUTE_32XF", n=8),
        hipblaslt_trace(compute="COMPUTE_32F_16BF"),
        hipblaslt_trace(alpha="alphaVector"),
    ]
    assert list(counts(read(log, "".join(texts)))) == [
        "16x32x64_fp16_TN", "16x32x64_fp16_TN_batch8", "16x32x64_fp16_TN_biasn", "8x32x64_fp16_TN",
        "it computes in f32_bf16_r", "it asks for a factor a row (alphaVector)",
    ]  # fmt: skip


def test_a_captured_workload(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "# Captured\n"
        '- {"M": 16, "N": 64, "K": 128, "rowMajorA": "T", "rowMajorB": "N", "dtype_a": "bf16", "count": 7}\n'
        '- {"M": 16, "N": 64, "K": 128, "rowMajorA": "T", "rowMajorB": "N", "dtype_a": "fp8e4m3fn", "count": 2}\n'
    )
    found = read_workload(LogFile(path), GFX942)
    assert [(p.count, p.call.transposes, p.call.m, p.call.n) for p in found.products] == [
        (7, "TN", 64, 16), (2, "TN", 64, 16),
    ]  # fmt: skip
    assert found.products[0].problem is not None and found.products[1].problem is None


@pytest.mark.parametrize("text", ["", "nothing here\n", "{}"])
def test_what_is_no_log(log: Path, text: str) -> None:
    refuses(r"is empty|in no known format.*HIPBLASLT_LOG_MASK", read, log, text)


@hypothesis.given(data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=150)
def test_whatever_a_log_holds_is_reported_in_a_line(log: Path, data: st.DataObject) -> None:
    """Damage anywhere gives an error of ours, or calls and remarks."""
    text = line() + line("bench", batch=2) + line("rocblas") + trace()
    place = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.text("{}:,=-[]'\"0159 TNmnabf\n\x00\u20ac", max_size=6))
    log.write_text(text[:place] + damage + text[place + data.draw(st.integers(0, 12)) :])
    try:
        found = read_workload(LogFile(log), GFX950)
    except InputError as error:
        assert str(log) in str(error)
    else:
        assert all(one.count > 0 and (one.problem is None) == bool(one.reason) for one in found.products)


def test_what_a_capture_left_out_is_reported(log: Path) -> None:
    size = '"M": %d, "N": 64, "K": 32, "rowMajorA": "T", "rowMajorB": "N", "dtype_a": "%s", "dtype_b": "bf16", '
    size += '"dtype_c": "bf16", "bias": "none", "family": "dense"'
    left = size % (16, "complex64") + ', "reason": "there are no kernels for complex64", "operation": "mm"'
    rows = [
        "# Gradients were wanted: the products of the backward pass are not among them.",
        f'- {{{size % (8, "bf16")}, "operation": "linear", "count": 3, "callers": []}}',
        f'# left out: {{{left}, "count": 5, "callers": []}}',
        '# left out: {"reason": "tensors of sparse layouts", "operation": "addmm", "count": 7, "callers": []}',
        '# left out: {"count": "many"}',
    ]
    found = read(log, "\n".join(rows) + "\n")
    ours, lost = found.products
    assert ours.count == 3 and ours.problem is not None
    assert (lost.count, lost.problem, lost.reason) == (5, None, "mm: there are no kernels for complex64")
    assert (lost.call.m, lost.call.n, lost.call.k, lost.call.transposes) == (64, 16, 32, "TN")
    gradients, unknown, unread = found.remarks
    assert "line 1: Gradients were wanted" in gradients and "line 5: what the capture left out" in unread
    assert "line 4: 7 calls of unknown sizes are not counted, nor is their time: addmm: tensors of sparse" in unknown
