"""Log: the trace of cuBLASLt (CUBLASLT_LOG_LEVEL=2 or more) and that of hipBLASLt (HIPBLASLT_LOG_MASK=2).

    [2026-05-04 15:08:47][cublasLt][53055][Trace][cublasLtMatmul] A=0X1 Adesc=[type=R_8F_E4M3 rows=1024 cols=2048
    ld=1024] … computeDesc=[computeType=COMPUTE_32F scaleType=R_32F transa=OP_T aScalePointer=0x2 …] … stream=0X0

on one line. What is at its default is not written: no transa is OP_N, no epilogue is none. cuBLASLt does not write
alpha, which is taken for 1.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from tritongemm.campaigns.logs._fields import OTHERS, Fields, add_row
from tritongemm.core.errors import InputError
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents, LogFault

_HEAD = re.compile(
    r"\[(?P<library>cublasLt|HIPBLASLT)\]\[[0-9]+\]\[Trace\]\[(?P<function>cublasLt\w*Matmul|rocblaslt_matmul)\]"
)
_ANY_HEAD = re.compile(r"\[(?:cublasLt|HIPBLASLT)\]\[[0-9]+\]\[\w+\]\[\w+\]")
_GROUP = re.compile(r"(?P<name>[A-Da-z]\w*[dD]esc)=\[(?P<inside>[^\[\]]*)\]")
_PAIR = re.compile(r"(?P<name>\w+)=(?P<value>\S+)")
_TYPES = {
    "R_16BF": "bf16_r", "R_16F": "f16_r", "R_32F": "f32_r", "R_64F": "f64_r", "R_8I": "i8_r", "R_32I": "i32_r",
    "R_8F_E4M3": "f8_r", "R_8F_E5M2": "bf8_r", "R_8F_E4M3_FNUZ": "f8_fnuz_r", "R_8F_E5M2_FNUZ": "bf8_fnuz_r",
    "R_4F_E2M1": "f4_r", "C_32F": "f32_c", "C_64F": "f64_c",
}  # fmt: skip
_SUMS = {
    "COMPUTE_32F": "f32_r", "COMPUTE_32F_FAST_TF32": "xf32_r", "COMPUTE_32F_FAST_16F": "f32_f16_r",
    "COMPUTE_32F_FAST_16BF": "f32_bf16_r", "COMPUTE_32F_PEDANTIC": "f32_r", "COMPUTE_16F": "f16_r",
    "COMPUTE_16F_PEDANTIC": "f16_r", "COMPUTE_32I": "i32_r", "COMPUTE_32I_PEDANTIC": "i32_r", "COMPUTE_64F": "f64_r",
    "COMPUTE_64F_PEDANTIC": "f64_r", "COMPUTE_32XF": "xf32_r", "COMPUTE_32F_16F": "f32_f16_r",
    "COMPUTE_32F_16BF": "f32_bf16_r",
}  # fmt: skip
# hipBLASLt's names that differ from cuBLASLt's.
_OWN_NAMES = {"batch_count": "batchCount", "batch_stride": "stridedBatchOffset", "biasType": "biasDataType"}
_LAYOUT = {"type", "rows", "cols", "ld", "batchCount", "stridedBatchOffset", "order"}
_PLAIN_ORDERS = ("", "ORDER_COL", "col")
_PASSED = {  # fields that do not change what is computed
    "computeType", "scaleType", "smCountTarget", "fastAccum", "pointerMode", "biasPointer", "biasDataType", "epilogue",
    "transa", "transb", "transA", "transB", "amaxDPointer", "aScalePointer", "bScalePointer", "cScalePointer",
    "dScalePointer", "aScaleMode", "bScaleMode", "cScaleMode", "dScaleMode",
}  # fmt: skip
_SCALE_MODES = {"": "1", "SCALAR_32F": "1", "OUTER_VEC_32F": "2", "VEC32_UE8M0": "3"}
_POINTER = re.compile(r"=0[xX]0*[1-9a-fA-F][0-9a-fA-F]*")
_NO_POINTER = re.compile(r"0[xX]0*|0|\(nil\)")


class MatmulTrace(CallLog):
    """The reader of traces of cuBLASLt and hipBLASLt."""

    title: ClassVar[str] = "the trace of cuBLASLt (CUBLASLT_LOG_LEVEL=2 or more) or hipBLASLt (HIPBLASLT_LOG_MASK=2)"

    def read(self, text: str) -> LogContents:
        """Return a call for each line that traces a product."""
        contents = LogContents()
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            for head in _HEAD.finditer(line) if "Trace" in line else ():
                other = _ANY_HEAD.search(line, head.end())
                traced = line[head.end() : other.start() if other else len(line)]
                if "stream=" not in traced or (other is None and not traced.endswith(("\n", "\r"))):
                    contents.faults.append(LogFault(number, "the line is cut: it does not end with a stream"))
                    continue
                fields = _known_fields(_POINTER.sub("=0x1", traced))
                if isinstance(fields, str):
                    contents.faults.append(LogFault(number, fields))
                else:
                    add_row(contents, fields, number, f"{head['library']}'s trace")
        return contents


@lru_cache(maxsize=1 << 14)
def _known_fields(text: str) -> Fields | str:
    """Return `_fields` or the fault, cached: but for pointers most lines of a log are equal."""
    try:
        return _fields(text)
    except InputError as error:
        return str(error)


def _fields(text: str) -> Fields:
    """Return the fields of a call by the names of hipBLASLt's profile."""
    groups = {match["name"]: _pairs(match["inside"]) for match in _GROUP.finditer(text)}
    outside = _pairs(_GROUP.sub("", text))
    for name in ("Adesc", "Bdesc", "Ddesc", "computeDesc"):
        if name not in groups:
            raise InputError(f"it has no {name} in brackets")
    layouts = {which: groups[f"{which}desc"] for which in "ABCD" if f"{which}desc" in groups}
    compute = groups["computeDesc"]
    values = {f"trans{w}": _operation(compute.get(f"trans{w.lower()}") or compute.get(f"trans{w}")) for w in "AB"}
    a, b, d = (Fields(layouts[which]) for which in "ABD")
    sizes = [(layout.integer("rows", least=1), layout.integer("cols", least=1)) for layout in (a, b, d)]
    (m, k), (inner, n) = (
        size if trans == "N" else size[::-1] for size, trans in zip(sizes, values.values(), strict=False)
    )
    if inner != k or sizes[2] != (m, n):
        raise InputError(f"its operands do not fit each other: {m} x {k} times {inner} x {n} gives {sizes[2]}")
    values |= {"M": str(m), "N": str(n), "K": str(k), "batch_count": d.get("batchCount", "1")}
    for which, layout in layouts.items():
        values[f"{which.lower()}_type"] = _TYPES.get(layout.get("type", ""), layout.get("type", ""))
        values[f"ld{which.lower()}"] = layout.get("ld", "0")
        values[f"stride_{which.lower()}"] = layout.get("stridedBatchOffset", "0")
    values["compute_type"] = _SUMS.get(compute.get("computeType", ""), compute.get("computeType", ""))
    values |= {name: outside[name] for name in ("alpha", "beta") if name in outside}
    values |= _epilogue(compute, values["d_type"]) | _scales(compute, values)
    if strange := _strange(layouts, compute, outside):
        values[OTHERS] = strange
    return Fields(values)


def _pairs(text: str) -> dict[str, str]:
    return {_OWN_NAMES.get(match["name"], match["name"]): match["value"] for match in _PAIR.finditer(text)}


def _operation(text: str | None) -> str:
    return (text or "OP_N").removeprefix("OP_")


def _epilogue(compute: Mapping[str, str], d_type: str) -> dict[str, str]:
    name = compute.get("epilogue", "EPILOGUE_DEFAULT").removeprefix("EPILOGUE_")
    words = name.split("_")
    found = {"activation_type": "none" if name in ("DEFAULT", "BIAS") else name.lower()}
    if "BIAS" in words:
        kind = compute.get("biasDataType", "")
        found |= {"bias_vector": "true", "bias_type": _TYPES.get(kind, kind) or d_type}
    return found


def _scales(compute: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the factors of the operands; those of C and D count only where they are of 8 bits, as for the library."""
    found = {}
    for which in "abcd":
        given = not _NO_POINTER.fullmatch(compute.get(f"{which}ScalePointer", "0"))
        narrow = "8" in values.get(f"{which}_type", "") or which in "ab"
        if given and narrow:
            mode = compute.get(f"{which}ScaleMode", "")
            found[f"scale{which.upper()}"] = _SCALE_MODES.get(mode, mode)
    return found


def _strange(layouts: Mapping[str, Mapping[str, str]], compute: Mapping[str, str], outside: Mapping[str, str]) -> str:
    """Return a request of a call that has no other name here."""
    found = [f"{which}: {name}={value}" for which, layout in layouts.items() for name, value in layout.items()
             if name not in _LAYOUT or (name == "order" and value not in _PLAIN_ORDERS)]  # fmt: skip
    found += [f"{name}={value}" for name, value in compute.items() if name not in _PASSED]
    found += ["a factor a row (alphaVector)"] if "alphaVector" in outside else []
    return ", ".join(found)
