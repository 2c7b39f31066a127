"""Parses maps in braces, as the profiles of rocBLAS and hipBLASLt write them: close to YAML, and not YAML.

Some versions leave a key or a value out (``scaleB: 0, : , : , scaleAlpha_vector: false``), which no YAML reader takes.
Lines of several processes may be mixed, so that a map begins in the middle of a line, or another one's beginning stands
where its end should be.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from tritongemm.campaigns.logs._fields import GROUPED, Fields, split_groups
from tritongemm.core.errors import InputError
from tritongemm.plugins.contracts.call_logs import LogContents, LogFault

_PIECE = re.compile(r"\s*['\"]?(?P<key>[A-Za-z_]\w*)['\"]?\s*:(?![:])\s*(?P<value>.*?)\s*", re.ASCII | re.DOTALL)
_LOWER = {"m": "M", "n": "N", "k": "K"}  # as the sizes of grouped products are called
_END = re.compile(r"call_count\s*:\s*[0-9]+\s*\}", re.ASCII)


def read_counted(text: str, first_key: str, contents: LogContents) -> Iterator[tuple[int, Fields, int]]:
    """Yield the maps of a profile, each with the number of its line and how often it was called."""
    for line, fields in read_maps(text, first_key):
        if isinstance(fields, str):
            contents.faults.append(LogFault(line, fields))
            continue
        try:
            count = fields.integer("call_count", 1)
        except InputError as error:
            contents.faults.append(LogFault(line, str(error)))
            continue
        if count:
            yield line, fields, count
        else:
            contents.faults.append(LogFault(line, "call_count is 0"))


def read_maps(text: str, first_key: str) -> Iterator[tuple[int, Fields | str]]:
    """Yield the maps that begin with a key, each with its line number; instead of one that can't be read, why."""
    start = re.compile(rf"\{{\s*['\"]?{first_key}['\"]?\s*:")
    for number, line in enumerate(text.splitlines(), start=1):
        if "{" not in line and "}" not in line:
            continue
        places = [match.start() for match in start.finditer(line)]
        for place, following in pairwise([*places, len(line)]):
            found = _read(line[place + 1 : following])
            for fields in [found] if isinstance(found, str) else found:
                readable = isinstance(fields, str) or first_key in fields
                yield number, fields if readable else f"the row has no {first_key} that can be read"
        if not places and "{" not in line and _END.search(line):
            yield number, "it is the end of a row whose beginning is not there"


def _read(text: str) -> list[Fields] | str:
    """Return the fields of a map's text from behind its brace; of several products those of each."""
    inside, brace, _ = text.partition("}")
    if not brace:
        return "the row is cut: its closing brace is not there"
    pairs: list[tuple[str, str]] = []
    for piece in inside.split(","):
        match = _PIECE.fullmatch(piece)
        if match and match["key"] == GROUPED and (first := _PIECE.fullmatch(match["value"])):
            pairs += [(GROUPED, "true"), _pair(first)]
        elif match:
            pairs.append(_pair(match))
        elif piece.strip(" :\t") and pairs:  # names of kernels may hold commas
            pairs[-1] = pairs[-1][0], f"{pairs[-1][1]},{piece}"
    found = split_groups(pairs)
    return f"the row {found}" if isinstance(found, str) else list(map(Fields, found))


def _pair(match: re.Match[str]) -> tuple[str, str]:
    """Return a name and its value; a name that stands alone is a product's."""
    return _LOWER.get(match["key"], match["key"]), match["value"].strip("'\"")
