"""The README's picture of a terminal, drawn from the transcript of a first run."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

PAGE = Path("docs/images/terminal.svg")
TRANSCRIPT = Path("docs/tutorial/first-run.md")
_COLUMNS = 100
_SHOWN = re.compile(r"(?ms)^(?P<command>\$ tritongemm tune --gemm_size_file .*?)^Best of each backend")
_FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # fetched from elsewhere


def text() -> str:
    """Return the picture as SVG."""
    found = _SHOWN.search(TRANSCRIPT.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{TRANSCRIPT} has no run with a file of sizes")
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False, color_system="truecolor")
    for line in found["command"].splitlines():
        console.print(Text(line, style="bold" if line.startswith("$") else ""))
    return console.export_svg(
        title="tritongemm on an NVIDIA H200", code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT), unique_id="terminal"
    )
