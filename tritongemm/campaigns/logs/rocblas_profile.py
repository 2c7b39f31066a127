"""Log: rocBLAS's profile (ROCBLAS_LAYER=4), maps with how often each function was called.

- { rocblas_function: "rocblas_gemm_ex", a_type: "bf16_r", …, transA: 'T', M: 12288, …, call_count: 136 }
"""

import re
from typing import ClassVar

from tritongemm.campaigns.logs._fields import OTHERS, Fields, add_row, write_into_c
from tritongemm.campaigns.logs._maps import read_counted
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents

_FUNCTION = re.compile(
    r"rocblas_(?P<type>[hsdcz]?)gemm(?P<by_pointers>_batched)?(?:_strided_batched)?(?:_ex\d?)?(?:_64)?"
)
_TYPES = {"h": "f16_r", "s": "f32_r", "d": "f64_r", "c": "f32_c", "z": "f64_c"}


class RocblasProfile(CallLog):
    """The reader of rows of rocBLAS's profile."""

    title: ClassVar[str] = "rocBLAS's profile (ROCBLAS_LAYER=4)"

    def read(self, text: str) -> LogContents:
        """Return a call for each row of a GEMM, with its count."""
        contents = LogContents()
        for line, fields, count in read_counted(text, "rocblas_function", contents):
            name = fields["rocblas_function"]
            function = _FUNCTION.fullmatch(name)
            if function is None:
                contents.others[name] += count
            else:
                add_row(contents, _typed(fields, function), line, "rocBLAS's profile", count)
        return contents


def _typed(fields: Fields, function: re.Match[str]) -> Fields:
    """Return the fields with the types that the function's name contains."""
    values = dict(fields)
    if function["type"]:
        own = _TYPES[function["type"]]
        values = {name: own for name in ("a_type", "b_type", "c_type", "d_type", "compute_type")} | values
    values = write_into_c(values)
    if function["by_pointers"]:
        values[OTHERS] = "a batch by pointers"
    return Fields(values)
