"""Log: a toy, lines ``toy M N K x COUNT;`` of a library that knows no types but float16."""

from __future__ import annotations

import re
from typing import ClassVar

from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents, LogFault, LoggedCall, LoggedRow

_LINE = re.compile(r"toy ([0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,9}) x ([0-9]{1,9});", re.ASCII)


class ToyLog(CallLog):
    """Lines of the toy."""

    title: ClassVar[str] = "the toy's log, toy M N K x COUNT;"

    def read(self, text: str) -> LogContents:
        """A call for each line."""
        contents = LogContents()
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.startswith("toy "):
                continue
            if match := _LINE.fullmatch(line):
                m, n, k, count = map(int, match.groups())
                call = LoggedCall(m, n, k, "NN", ("f16_r", "f16_r", "f16_r", "f16_r"), "f32_r")
                contents.rows.append(LoggedRow(call, count, number, "the toy's log"))
            else:
                contents.faults.append(LogFault(number, "it must be toy M N K x COUNT;"))
        return contents
