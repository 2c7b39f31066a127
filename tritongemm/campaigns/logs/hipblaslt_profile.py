"""Log: hipBLASLt's profile (HIPBLASLT_LOG_MASK=64) and extended profile (128): maps with how often each was called.

    - {function: matmul, M: 16032, N: 109, K: 16384, lda: 16384, …, activation_type: none, call_count: 1}

The extended one names the solution and the kernel as well. With both bits set the library writes both.
"""

from typing import ClassVar

from tritongemm.campaigns.logs._fields import add_row
from tritongemm.campaigns.logs._maps import read_counted
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents

_KERNEL_KEYS = {"kernel_name", "solution_name", "solution_Name"}


class HipblasltProfile(CallLog):
    """The reader of rows of hipBLASLt's profile."""

    title: ClassVar[str] = "hipBLASLt's profile (HIPBLASLT_LOG_MASK=64 or 128)"

    def read(self, text: str) -> LogContents:
        """Return a call for each row, with its count."""
        contents = LogContents()
        for line, fields, count in read_counted(text, "function", contents):
            if fields["function"] != "matmul":
                contents.others[fields["function"]] += count
            else:
                kind = "extended profile" if _KERNEL_KEYS & fields.keys() else "profile"
                add_row(contents, fields, line, f"hipBLASLt's {kind}", count)
        return contents
