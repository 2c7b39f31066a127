r"""What a program wrote, out of the lines of JSON in which Docker keeps it (the driver ``json-file``).

{"log":"hipblaslt-bench -m 16 …\n","stream":"stderr","time":"2026-05-04T15:08:47.1Z"}

A line of more than 16 KiB is split into several of these, of which only the last one's text ends with a new line.
"""

from __future__ import annotations

import json
import re

_BEGINNING = '{"log":'  # plain text, so that a log of anything else is passed over quickly
_LINE = re.compile(r'^\{"log":.*\n?', re.MULTILINE)


def unwrapped(piece: str) -> str:
    """Return the text with each of Docker's lines replaced by what it holds; other lines, and damaged ones, stay.

    Args:
        piece: complete lines of a log.
    """
    return _LINE.sub(_text, piece) if _BEGINNING in piece else piece


def _text(line: re.Match[str]) -> str:
    try:
        text = json.loads(line[0])["log"]
    except (ValueError, RecursionError):
        return line[0]
    return text.encode(errors="replace").decode() if isinstance(text, str) else line[0]
