"""The tutorial's page, whose console blocks are run again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGE = Path("docs/tutorial/ten-minutes.md")
_FILE = re.compile(r'(?ms)^```python title="(?P<name>[\w.]+)"\n(?P<text>.*?)^```$')
_CONSOLE = re.compile(r"(?ms)^```console\n(?P<shown>.*?)^```$")
_VARYING = re.compile(r"about \d+ \w+( on \d+ cores)?")  # from machine to machine
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "COLUMNS": "100"}


def commands(page: str) -> list[str]:
    """Return the commands of the page that are run again."""
    return [line[2:] for block in _CONSOLE.finditer(page) for line in block["shown"].splitlines() if line[:2] == "$ "]


def text() -> str:
    """Return the page with what its commands print now; a block that differs in estimates only stays."""
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for file in _FILE.finditer(page):
            (Path(folder) / file["name"]).write_text(file["text"], encoding="utf-8")
        shown = iter(list(_outputs(commands(page), Path(folder))))

    def renewed(block: re.Match[str]) -> str:
        lines = "".join(f"$ {command}\n{next(shown)}" for command in commands(block[0]))
        same = _VARYING.sub("", lines) == _VARYING.sub("", block["shown"])
        return block[0] if same else f"```console\n{lines}```"

    return _CONSOLE.sub(renewed, page)


def _outputs(words: list[str], folder: Path) -> Iterator[str]:
    environment = os.environ | _NO_GPU | {"PYTHONPATH": os.getcwd(), "TRITONGEMM_CACHE": str(folder / "cache")}
    for command in words:
        line = re.sub(r"^(tritongemm|python)\b", lambda found: _programs()[found[1]], command)
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        yield done.stdout


def _programs() -> dict[str, str]:
    return {"tritongemm": f"{sys.executable} -m tritongemm", "python": sys.executable}
