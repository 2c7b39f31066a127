import pytest
import yaml

from tests.support import DATA
from tests.support.formats import read_text
from tests.support.nouns import Config, Format, FormatRow, InputError, Problem, apart, cases, each, matrices, registry
from tritongemm.formats import Defaults, make_problem

FIELD = DATA / "tune_gemm"
TUNE_GEMM = registry.get(Format, "tune_gemm")


def rows(text: str, defaults: Defaults | None = None) -> list[FormatRow]:
    return read_text(text, defaults=defaults)


def test_every_form_of_a_result() -> None:
    first, remark, stream, keys, block, bare = rows((DATA / "tune_gemm_results.yaml").read_text())
    options = (("kpack", 2), ("matrix_instr_nonkdim", 16), ("waves_per_eu", 0))
    assert first.config == Config("tile", 64, 32, 128, 4, 2, 8, 2, options)
    assert first.problem == Problem(512, 256, 1024, *matrices(layout="TN"))
    assert (first.line, remark.line, block.line) == (3, 6, 9)
    assert first.record is None, "no time, no result"
    assert remark.config == Config("tile", 64, 32, 128, 1, 1, 4, 2)
    assert remark.record and remark.record.seconds == pytest.approx(3e-6)
    assert (remark.record.timer, remark.record.cold, remark.record.target) == ("tune_gemm", False, "")
    assert stream.config and (stream.config.template, stream.config.options) == ("stream_k", (("num_sms", 304),))
    assert stream.record and stream.record.seconds == pytest.approx(2e-6), "a rate alone gives the time"
    assert keys.record and keys.record.seconds == 3.5e-6, "keys go before a remark"
    assert block.record and block.record.seconds == 7e-6
    assert (bare.problem, bare.config, bare.record) == (Problem(1, 2, 3), None, None)


@apart(
    ("fallback_tuned_configs_gfx942.yaml", 63, 63),
    ("python_perf-kernels_tools_tune_gemm_config_fp16.yaml", 15, 15),
    ("python_perf-kernels_tools_tune_gemm_database.yaml", 13, 13),
    ("tuning_gemm_sizes.yaml", 63, 0),
)
def test_files_from_the_field(name: str, count: int, tuned: int, /) -> None:
    path = FIELD / name
    text = path.read_text()
    read, plain = TUNE_GEMM.read(path, text, Defaults()), yaml.safe_load(text)
    assert TUNE_GEMM.recognises(path, text)
    assert (len(read), sum(r.config is not None for r in read)) == (count, tuned)
    for row, entry in zip(read, plain, strict=True):
        assert row.line and f"'K': {row.problem.k}," in text.splitlines()[row.line - 1]
        assert (row.problem.m, row.problem.n, row.problem.k) == (entry["M"], entry["N"], entry["K"])
        assert row.problem.layout == entry["rowMajorA"] + entry["rowMajorB"]
        if row.config:
            assert row.config.tile == tuple(entry[f"BLOCK_SIZE_{x}"] for x in "MNK")
            assert row.config.option("kpack") == entry["kpack"] and row.config.num_stages == 2


def test_callers_defaults_a_familys_type_of_b_and_repeated_rows() -> None:
    flags = Defaults.of("fp8", "", "bf16", layout="NN", bias="m", fp8_encoding="fnuz")
    bare, typed = rows(
        "- {M: 1, N: 2, K: 3}\n- {M: 1, N: 2, K: 3, dtype_a: bf8, dtype_b: fp16, rowMajorB: T, bias: none}", flags
    )
    assert bare.problem == Problem(1, 2, 3, *matrices("fp8e4m3fnuz", c="bf16", layout="NN"), bias="m")
    assert typed.problem == Problem(1, 2, 3, *matrices("fp8e5m2fnuz", "fp16", "bf16", layout="NT"), bias="none")
    with pytest.raises(InputError, match="the target has no fp8; choose another dtype"):
        make_problem(Defaults.of("fp8", fp8_encoding="none"), 1, 1, 1)
    given = Defaults.of("int8", layout="TN", family="a8w4")
    assert make_problem(given, 16, 32, 128).b.dtype == "int4"
    with pytest.raises(InputError, match="family a8w4 does not multiply int8 by fp4e2m1; it is fp8 or int8 by a"):
        make_problem(given, 16, 32, 128, {"dtype_b": "fp4e2m1"})
    with pytest.raises(InputError, match=r"row 3 \(line 4\) repeats row 1 \(line 1\), 1x1x1_fp16_TT"):
        rows("- {M: 1, N: 1, K: 1}\n- {M: 2, N: 1, K: 1}\n\n- {M: 1, N: 1, K: 1, rowMajorA: T}\n")


@each(("a", "c"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp8e4m3fn", "fp16"), ("int8", "int32")])
def test_c_follows_a(a: str, c: str) -> None:
    assert make_problem(Defaults.of(a), 1, 1, 1) == Problem(1, 1, 1, *matrices(a, c=c))


SIZE = "M: 16, N: 16, K: 16"
TILE = SIZE + ", BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16"


@cases(
    ("{M: 16, N: 16}", "has no K"),
    ("{M: 16}", "has no N, K"),
    ("{M: 16, N: 16, K: 0}", "K must be at least 1, not 0"),
    ("{M: -1, N: 16, K: 1}", "M must be at least 1, not -1"),
    ("{M: 16, N: 16, K: '16'}", "K must be a whole number, not '16'; remove the quotes"),
    ("{M: 16, N: 16, K: abc}", "K must be a whole number, not 'abc'"),
    ("{M: 16, N: 16, K: true}", "K must be a whole number, not 'true'"),
    ("{M: 16, N: 16, K: 16.0}", "K must be a whole number, not '16.0'"),
    ("{M: 16, N: 16, K: 010}", "K must be a whole number, not '010'"),
    ("{M: 16, N: 16, K: [1]}", "K must be a whole number, not a list"),
    ("{M: 16, N: 16, K: }", "K must be a whole number, not nothing"),
    ("{M: 16, N: 16, K: 2147483648}", "K must be between 1 and 2147483647"),
    ("{M: 16, N: 16, K: 16, K: 16}", "has K twice"),
    ("{m: 16, N: 16, K: 16}", "has an unknown key 'm'; did you mean 'M'?"),
    (f"{{{TILE}, num_wraps: 4}}", "did you mean 'num_warps'?"),
    (f"{{{TILE}, Time (us): 4}}", "did you mean 'time(us)'?"),
    (f"{{{SIZE}, '': 4}}", "there are: M, N, K"),
    (f"{{{SIZE}, rowMajorA: t}}", "rowMajorA must be one of T, N, not 't'"),
    (f"{{{SIZE}, rowMajorA: true}}", "rowMajorA must be text, not 'true'"),
    (f"{{{SIZE}, dtype_a: fp7}}", "unknown dtype 'fp7'"),
    (f"{{{SIZE}, dtype_c: 16}}", "dtype_c must be text"),
    (f"{{{SIZE}, bias: yes}}", "bias must be text"),
    (f"{{{SIZE}, bias: k}}", "bias must be one of none, m, n, not 'k'"),
    (f"{{{SIZE}, batch: 0}}", "batch must be at least 1"),
    (f"{{{SIZE}, family: sparse}}", "family must be one of"),
    (f"{{{SIZE}, BLOCK_SIZE_M: 16}}", "has BLOCK_SIZE_M but no BLOCK_SIZE_N, BLOCK_SIZE_K"),
    (f"{{{SIZE}, num_warps: 4}}", "has num_warps but no BLOCK_SIZE_M"),
    (f"{{{SIZE}, winner: torch}}", "has winner but no BLOCK_SIZE_M"),
    (f"{{{TILE}, num_warps: -1}}", "num_warps must be at least 0"),
    (f"{{{TILE}, backend: abacus}}", "backend must be one of"),
    (f"{{{TILE}, options: {{kpack: two}}}}", "options: kpack must be a whole number"),
    (f"{{{TILE}, options: {{Kpack9: 2}}}}", "that no config name can hold"),
    (f"{{{TILE}, options: 3}}", "options must be a map"),
    (f"{{{TILE}, time(us): 1, toolchain: [a]}}", "toolchain must be a map"),
    (f"{{{TILE}, time(us): 1, toolchain: {{a: '1', a: '2'}}}}", "has toolchain: a twice; keep one of them"),
    (f"{{{TILE}, time(us): 0}}", "time(us) must be a positive number, not '0'"),
    (f"{{{TILE}, time(us): fast}}", "time(us) must be a positive number"),
    (f"{{{TILE}, TFLOPS: .nan}}", "TFLOPS must be a positive number"),
    (f"{{{TILE}, time(us): 1, spread: [1]}}", "spread must be a number"),
    (f"{{{TILE}, time(us): 1, tie: maybe}}", "tie must be true or false"),
    (f"{{{TILE}, time(us): 1e999}}", "time(us) must be a positive number, not '1e999'"),
    (f"{{{TILE}, time(us): 1e9999999}}", "time(us) must be a positive number"),
    (f"{{{TILE}, time(us): 1e{'9' * 5000}}}", "time(us) must be a positive number"),
    (
        f"{{{TILE}, TFLOPS: 1e-320}}",
        "takes inf seconds by its TFLOPS or remark, not a time from 1 ns to 10,000 s; correct or",
    ),
    (f"{{{TILE}, time(us): 1, library_us: -1}}", "library_us must be a positive number, not '-1'"),
    (f"{{{TILE}, time(us): 1, spread: -0.1}}", "spread must be a number of at least 0, and finite, not '-0.1'"),
    (f"{{{TILE}, time(us): 1, spread: .inf}}", "spread must be a number of at least 0, and finite, not '.inf'"),
    (f"{{{TILE}, time(us): 1, spread: 1e999}}", "spread must be a number"),
    (f"{{{TILE}, time(us): 1, error: .nan}}", "error must be a number"),
    (f"{{{TILE}, time(us): 1, error: -1}}", "error must be a number"),
    (f"{{{TILE}, time(us): 1, tolerance: .inf}}", "tolerance must be a number"),
    (f"{{{TILE}, time(us): 1, compute_units: 9223372036854775808}}", "compute_units must be at most 92233"),
    (f"{{{TILE}, GROUP_SIZE_M: {'9' * 5000}}}", "GROUP_SIZE_M must be at most 9223372036854775807, not 9999"),
    (f"{{{TILE}, GROUP_SIZE_M: -{'9' * 5000}}}", "GROUP_SIZE_M must be at least 0, not -9999"),
    (f"{{{TILE}, options: {{kpack: 9223372036854775808}}}}", "options: kpack must be at most 9223372036854775807"),
    (f"{{M: 1, N: 1, K: {'9' * 5000}}}", "K must be at most"),
    ("5", "must be a map"),
    ("[1, 2]", "must be a map, such as {M: 4096, N: 4096, K: 8192}; it is a list"),
)
def test_wrong_row_is_named(row: str, complaint: str, /) -> None:
    with pytest.raises(InputError) as error:
        rows(f"# sizes\n- {{M: 1, N: 1, K: 1}}\n- {row}\n")
    assert str(error.value).startswith("rows.yaml: row 2 (line 3) ") and complaint in str(error.value)


@each(
    "row",
    [
        "{M: 1, N: 1, K: %s}", "{M: 1, N: 1, K: '%s'}", "{M: 1, N: 1, %s: 1}", "{M: 1, N: 1, K: 1, dtype_a: %s}",
        "{M: 1, N: 1, K: 1, family: %s}", f"{{{TILE}, template: '%s {{'}}", f"{{{TILE}, options: {{%s: 1, A: 1}}}}",
        f"{{{TILE}, time(us): %s}}", f"{{{TILE}, time(us): 1, cold: %s}}", "{M: 1, N: 1, K: 1, K: %s, K: 1}", "%s",
        "{M: 1, '%s': 1, '%s': 1}",
    ],
)  # fmt: skip
@each("text", ["x" * 100_000, "9" * 100_000])
def test_a_message_does_not_repeat_a_long_value(row: str, text: str) -> None:
    with pytest.raises(InputError) as error:
        rows(f"- {row.replace('%s', text)}\n")
    assert len(str(error.value)) < 900


@cases(
    ("M: 16\nN: 16\n", "rows.yaml must be a list of maps, one a size, such as - {M: 4096"),
    ("just words", "must be a list of maps"),
    ("# nothing but this\n", "rows.yaml holds no rows"),
    ("[]", "rows.yaml holds an empty list"),
    ("- {M: 1\n- {M: 2}\n", "rows.yaml: row 1 (line 1) is not YAML: did not find expected ',' or '}' at its end"),
    ("- {M: 1, N: 1, K: 1}\n- {M: }2}\n", "rows.yaml: row 2 (line 2) is not YAML: did not find expected"),
    ("- {M: *unknown}\n", "rows.yaml: row 1 (line 1) has *unknown, but nothing before it is called &unknown"),
    ("- {M: 1}\n---\n- {M: 2}\n", "rows.yaml holds more than one document (line 2, column 1)"),
    ("- {M: \x01}\n", "rows.yaml: row 1 (line 1) is not YAML: unacceptable character"),
)
def test_wrong_file_is_named(text: str, complaint: str, /) -> None:
    with pytest.raises(InputError) as error:
        rows(text)
    assert complaint in str(error.value)
