"""Converts calls as libraries log them, column-major, to and from problems, row-major.

`ColumnMajor` says how the one is turned into the other: the library's TN is our TN, its NN our TT, its NT our NT and
its TT our NN.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tritongemm.core.dtypes import DTYPES, DType
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import granularity
from tritongemm.core.support import Support
from tritongemm.formats import LIBRARY_TYPES, ColumnMajor
from tritongemm.plugins.contracts.call_logs import SCALES, LoggedCall

# The letters that TuningDriver writes for types in the names of its configs.
_LETTERS = {
    "bf16": "B", "fp16": "H", "fp32": "S", "int8": "I8", "int32": "I", "fp8e4m3fn": "F8", "fp8e4m3fnuz": "F8N",
    "fp8e5m2": "B8", "fp8e5m2fnuz": "B8N", "fp4e2m1": "F4",
}  # fmt: skip
_SUMS = {"f32_r": "S", "xf32_r": "X", "f16_r": "H", "i32_r": "I", "f64_r": "D"}
_SCALED_FAMILY = "a8w8"  # products of 8 bits with a factor an operand, or one a row and a column
_BLOCK_FAMILY = "a8w8_blockscale"  # those whose factors change along K
# Our granularity of these factors, by what shares one in the library's A and B.
_ALONG_K = {("128x128", "1x128"): "block", ("1x128", "1x128"): "group"}
_FNUZ = {"f8_r": "f8_fnuz_r", "bf8_r": "bf8_fnuz_r"}
_THEIRS = {ours: theirs for theirs, ours in LIBRARY_TYPES.items()}


def as_problem(call: LoggedCall, fp8: str = "fn") -> Problem | Support:
    """Return a call's problem, or why there is none that computes the same.

    hipBLASLt logs both encodings of 8-bit floats by one name, so that what it says is read as the target computes.
    """
    if fp8 == "fnuz":
        a, b, c, d = (_FNUZ.get(kind, kind) for kind in call.types)
        call = replace(call, types=(a, b, c, d))
    if why := next(_differences(call), ""):
        return Support(why)
    given: dict[str, Any] = {"bias": "n" if call.bias else "none", "shared": _shared(call)}
    if call.scales[:2] in _ALONG_K:
        given |= {"family": _BLOCK_FAMILY, "scales": _ALONG_K[call.scales[:2]]}
    elif call.scales[0] != SCALES[0]:
        given |= {"family": _SCALED_FAMILY, "scales": "tensor" if call.scales[0] == "tensor" else ""}
    try:
        types = [LIBRARY_TYPES[kind] for kind in (*call.types[:2], call.types[3])]
        # To conjugate real numbers (C) changes nothing.
        problem = ColumnMajor(call.transposes, call.m, call.n, call.batch, call.k, *types).problem(given)
    except InputError as error:
        return Support(str(error))
    if call.bias and LIBRARY_TYPES.get(call.bias) != problem.bias_dtype.name:
        return Support(f"its bias is {call.bias}; here one of {problem.c.dtype} results is {problem.bias_dtype.name}")
    return problem


def _differences(call: LoggedCall) -> Iterator[str]:
    """Yield what a call asks for that no problem has."""
    yield from (f"it asks for {what}" for what in call.others)
    unknown = [kind for kind in (*call.types[:2], call.types[3]) if kind not in LIBRARY_TYPES]
    if unknown:
        yield f"its type {unknown[0]} is not computed here"
    for name, factor, wanted in (("alpha", call.alpha, 1.0), ("beta", call.beta, 0.0)):
        if math.isnan(factor):
            yield f"its {name} is on the device"
        elif factor != wanted:
            yield f"its {name} is {factor:g}; here it is {wanted:g}"
    if call.activation != "none":
        yield f"it applies {call.activation}"
    if call.compute == "f32_r" and "f32_r" in call.types[:2]:
        yield "it multiplies full float32; here their products are of tf32"
    if call.compute not in _SUMS or call.compute == "f64_r":
        yield f"it computes in {call.compute}"
    yield from _scale_differences(call)
    yield from _layout_differences(call)


def _scale_differences(call: LoggedCall) -> Iterator[str]:
    a, b, c, d = call.scales
    if (a, b) not in _ALONG_K and a != b:
        yield f"it scales A by {a} and B by {b}"
    elif (a, b) not in _ALONG_K and a not in SCALES[:3]:
        yield f"it scales by {a}, and does not say how the factors are stored"
    for name, scale in (("C", c), ("D", d)):
        if scale != SCALES[0]:
            yield f"it scales {name}"


def _layout_differences(call: LoggedCall) -> Iterator[str]:
    """Yield the operands that are parts of larger ones; where there is one column, its step does not matter."""
    strides = [call.strides[0], call.strides[1], call.strides[3]]
    for index, (name, rows, columns, lead) in enumerate(_matrices(call)):
        if lead not in (0, rows) and columns > 1:
            yield f"the columns of {name} are {lead} elements apart, of which it has {rows}"
        elif call.batch > 1 and strides[index] not in (0, rows * columns):
            yield f"the products of {name} are {strides[index]} elements apart, of which one has {rows * columns}"
    if call.batch > 1 and strides[2] == 0:
        yield "all products of the batch have one D"
    if call.batch > 1 and strides[:2] == [0, 0]:
        yield "all products of the batch are one"


def _matrices(call: LoggedCall) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name, rows, columns and step of A, B and D in memory."""
    a = (call.m, call.k) if call.transposes[0] == "N" else (call.k, call.m)
    b = (call.k, call.n) if call.transposes[1] == "N" else (call.n, call.k)
    yield "A", *a, call.leads[0]
    yield "B", *b, call.leads[1]
    yield "D", call.m, call.n, call.leads[3]


def _shared(call: LoggedCall) -> str:
    """Return the operand, in our terms, that a batch has once."""
    if call.batch == 1:
        return ""
    return "b" if call.strides[0] == 0 else "a" if call.strides[1] == 0 else ""


def as_call(problem: Problem) -> LoggedCall:
    """Return the call that a library would get for a problem; what no library has a word for is among its `others`."""
    p, turned = problem, ColumnMajor.of(problem)
    a, b, c = map(their_type, (turned.a, turned.b, turned.c))
    call = LoggedCall(
        turned.m, turned.n, turned.k, turned.transposes, (a, b, c, c), _sums(p), batch=p.batch,
        bias=their_type(p.bias_dtype.name) if p.bias != "none" else "",
        scales=_scales_of(p), others=tuple(_unsaid(p)),
    )  # fmt: skip
    a_lead, b_lead, d_lead = (rows for _, rows, _, _ in _matrices(call))
    strides = [0 if p.batch == 1 else rows * columns for _, rows, columns, _ in _matrices(call)]
    of_a, of_b = 0 if p.b.shared else strides[0], 0 if p.a.shared else strides[1]
    return replace(call, leads=(a_lead, b_lead, d_lead, d_lead), strides=(of_a, of_b, strides[2], strides[2]))


def their_type(name: str) -> str:
    """Return a library's name of a type; our name where it has none."""
    return _THEIRS.get(name, name)


def _sums(problem: Problem) -> str:
    if problem.a.type.is_integer:
        return "i32_r"
    return "xf32_r" if "fp32" in (problem.a.dtype, problem.b.dtype) else "f32_r"


def _scales_of(problem: Problem) -> tuple[str, str, str, str]:
    """Return a problem's scales by a library's names, or our own where it has none."""
    if problem.a.scaling is None and problem.b.scaling is None:
        return ("none", "none", "none", "none")
    name = granularity(problem.scalings) or "block"
    a, b = next((pair for pair, ours in _ALONG_K.items() if ours == name), (name, name))
    return (a, b, "none", "none")


def _unsaid(problem: Problem) -> Iterator[str]:
    if problem.groups is not None:
        yield f"{problem.group_count} groups"
    if problem.b.order != PLAIN:
        yield f"B in the order {problem.b.order}"
    if problem.bias == "m":
        yield "a bias a row"


def config_letters(call: LoggedCall) -> str:
    """Return TuningDriver's letters for configs of such calls, such as ``BBS_TN``: inputs, output, sums, transposes.

    Inputs of two types have the letters of both.
    """
    letters = [_LETTERS.get(LIBRARY_TYPES.get(kind, ""), _letters(kind)) for kind in (*call.types[:2], call.types[3])]
    inputs = letters[0] if letters[0] == letters[1] else letters[0] + letters[1]
    return f"{inputs}{letters[2]}{_SUMS.get(call.compute, 'S')}_{call.transposes}"


def _letters(kind: str) -> str:
    return "".join(c for c in kind.upper() if c.isascii() and c.isalnum())[:8]


def operand_dtype(call: LoggedCall) -> DType:
    """Return the type of A if it is known here, else fp16, for the rate of a data sheet."""
    return DTYPES[LIBRARY_TYPES.get(call.types[0], "fp16")]


def least_bytes(call: LoggedCall) -> int:
    """Return the least bytes that a call reads and writes, assuming two for each element of unknown types."""
    known = [LIBRARY_TYPES.get(kind, "") for kind in (*call.types[:2], call.types[3])]
    width = [DTYPES[name].width if name else 2.0 for name in known]
    sizes = [rows * columns for _, rows, columns, _ in _matrices(call)]
    return round(call.batch * sum(w * size for w, size in zip(width, sizes, strict=True)))
