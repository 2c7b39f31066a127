from dataclasses import replace

from tests.support.call_logs import line
from tests.support.nouns import Problem, Support, cases, each, matrices, registry
from tritongemm.backends.blaslt.algorithms import to_matmul
from tritongemm.campaigns.column_major import as_call, as_problem, config_letters, least_bytes
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LoggedCall


def call(**changes: object) -> LoggedCall:
    (row,) = registry.get(CallLog, "hipblaslt_profile").read(line(**changes)).rows  # type: ignore[arg-type]
    return row.call


def problem(**changes: object) -> Problem:
    found = as_problem(call(**changes))
    assert isinstance(found, Problem), found
    return found


def test_rows_of_the_guide_and_what_else_a_problem_and_its_log_hold() -> None:
    assert problem() == Problem(109, 16032, 16384, *matrices("bf16", layout="TN"))
    assert problem().key == "109x16032x16384_bf16_TN" and config_letters(call()) == "BBS_TN"
    assert config_letters(call(a="f8_r", d="bf16_r", scale=1)) == "F8BS_TN"
    assert config_letters(replace(call(), types=("f8_r", "bf8_r", "f16_r", "f16_r"))) == "F8B8HS_TN"
    assert config_letters(call(trans_a="N", a="f16_r", d="f16_r")) == "HHS_NN"
    assert least_bytes(call(m=2, n=3, k=5)) == 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert least_bytes(call(m=2, n=3, k=5, a="f9_r")) == 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert problem(bias="true").bias == "n" and problem(m=64, n=16, k=32, batch=8).batch == 8
    assert problem(m=64, n=16, k=32, batch=8, stride_a=0).shared == "b"
    assert problem(m=64, n=16, k=32, batch=8, stride_b=0).shared == "a"
    rows = problem(a="f8_r", scale=2)
    assert (rows.family, rows.scales, rows.a.dtype) == ("a8w8", "", "fp8e4m3fn")
    tensor = problem(a="f8_fnuz_r", scale=1)
    assert (tensor.scales, tensor.b.dtype) == ("tensor", "fp8e4m3fnuz")
    assert problem(a="f32_r", d="f32_r", compute="xf32_r").a.dtype == "fp32"
    assert problem(n=1, ldb=9000).m == 1, "the step to the next column counts for nothing where there is one"
    assert problem(m=64, n=16, k=32, a="i8_r", d="i32_r", compute="i32_r").c.dtype == "int32"
    found = as_problem(replace(call(), others=("swizzleA true",)))
    assert isinstance(found, Support) and found.reason == "it asks for swizzleA true"
    bias = as_problem(replace(call(bias="true"), bias="f32_r"))
    assert isinstance(bias, Support) and "its bias is f32_r" in bias.reason


@each(("theirs", "ours"), [("TN", "TN"), ("NN", "TT"), ("NT", "NT"), ("TT", "NN")])
def test_layouts_are_turned(theirs: str, ours: str) -> None:
    assert problem(trans_a=theirs[0], trans_b=theirs[1]).layout == ours


@each("theirs", ["TN", "NN", "NT", "TT"])
@each("batch", [1, 4])
def test_the_library_is_asked_for_the_same(theirs: str, batch: int) -> None:
    """What our own binding asks the library for is what the row says; and the way there and back changes nothing."""
    row = call(m=48, n=16, k=32, trans_a=theirs[0], trans_b=theirs[1], batch=batch)
    ours = as_problem(row)
    assert isinstance(ours, Problem) and ours.batch == batch
    p = ours
    lead = p.k if p.a.row_major else p.m, p.n if p.b.row_major else p.k, p.n
    matmul = to_matmul(p, lead, (p.m * p.k, p.k * p.n, p.m * p.n), 16, "amd")
    assert "".join(matmul.trans) == row.transposes
    assert (matmul.a.ld, matmul.b.ld, matmul.d.ld) == (row.leads[0], row.leads[1], row.leads[3])
    assert (matmul.d.rows, matmul.d.cols, matmul.d.batch) == (row.m, row.n, batch) and as_call(ours) == row


@cases(
    ({"beta": "1.0"}, "beta is 1"),
    ({"alpha": "0.5"}, "alpha is 0.5"),
    ({"activation": "gelu"}, "applies gelu"),
    ({"lda": 20000}, "columns of A are 20000 elements apart"),
    ({"m": 64, "n": 16, "k": 32, "batch": 2, "stride_a": 9999}, "products of A are 9999 elements apart"),
    ({"m": 64, "n": 16, "k": 32, "batch": 2, "stride_d": 0}, "one D"),
    ({"m": 64, "n": 16, "k": 32, "batch": 2, "stride_a": 0, "stride_b": 0}, "products of the batch are one"),
    ({"a": "f64_r", "d": "f64_r", "compute": "f64_r"}, "type f64_r"),
    ({"a": "f32_r", "d": "f32_r"}, "full float32"),
    ({"a": "f4_r", "scale": 3}, "scales by block"),
    ({"a": "f32_c", "d": "f32_c"}, "type f32_c"),
    ({"scale": 1}, "a8w8"),
)
def test_what_no_problem_is(changes: dict[str, object], why: str, /) -> None:
    found = as_problem(call(**changes))
    if isinstance(found, Problem):  # the family says no on every target
        assert found.family == why
    else:
        assert why in found.reason
