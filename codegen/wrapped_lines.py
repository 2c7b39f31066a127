"""Breaks long lines of generated Python inside their brackets."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import lru_cache

WIDTH = 120  # characters of a line
_OPERATORS = ("if ", "else ", "and ", "or ", "+ ", "- ", "* ", "| ", "& ")


@lru_cache(maxsize=256)  # kernels' texts are the same for many sizes
def wrap_text(text: str) -> str:
    """Return a text whose statements are wrapped, except those with comments or long strings in them."""
    lines, done, begin = text.split("\n"), list[str](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NEWLINE:
            continue
        end = token.end[0]
        first = next(i for i in range(begin, end) if lines[i].strip() and not lines[i].lstrip().startswith("#"))
        statement = join("\n".join(lines[first:end]))
        fits = max(map(len, lines[first:end])) <= WIDTH or "\n" in statement
        done += lines[begin:first] + (lines[first:end] if fits else wrap(statement))
        begin = end
    return "\n".join([*done, *lines[begin:]])


def join(statement: str) -> str:
    """Return a statement in one line, or as it is with comments or long strings in it."""
    if "\n" not in statement or '"""' in statement or "#" in statement:
        return statement
    statement = re.sub(r"(?<=[(\[{])\s*\n\s*", "", statement)
    return re.sub(r"\s*\n\s*", " ", re.sub(r"\s*\n\s*(?=[)\]}])", "", statement))


def wrap(line: str) -> list[str]:
    """Return a statement of one line as lines of at most `WIDTH` characters, where it has brackets to be broken in."""
    if len(line) <= WIDTH or '"""' in line or any(character == "#" for _, character, _ in _scan(line)):
        return [line]
    pad = line[: len(line) - len(line.lstrip())]
    pairs = list(_pairs(line))
    if not pairs:
        return [line]
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    if line.startswith("return ", len(pad)) and end - start < len(line) // 2:
        return wrap(f"{pad}return ({line[len(pad) + 7 :]})")
    lines = [line[: start + 1]]
    inner = pad + "    "
    parts = [p for part in _parts(line[start + 1 : end], ",") for p in _short(part, WIDTH - len(inner))]
    for part in parts:
        if len(lines) > 1 and len(lines[-1]) + 1 + len(part) <= WIDTH:
            lines[-1] += " " + part
        else:
            lines += [inner + part]
    wrapped = [lines[0], *(short for long in lines[1:] for short in wrap(long)), pad + line[end:]]
    return [*wrapped[:-1], *wrap(wrapped[-1])]


def _scan(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the places, characters and depths outside strings; a bracket is one level above its contents."""
    depth, quote, skip = 0, "", False
    for place, character in enumerate(text):
        if quote:
            skip, quote = character == "\\" and not skip, "" if character == quote and not skip else quote
            continue
        if character in "\"'":
            quote = character
        depth -= character in ")]}"
        yield place, character, depth
        depth += character in "([{"


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of the outermost brackets and of those that close them."""
    opened = 0
    for place, character, depth in _scan(text):
        if depth == 0 and character in "([{":
            opened = place
        elif depth == 0 and character in ")]}":
            yield opened, place


def _short(part: str, width: int) -> list[str]:
    """Return a part in a bracket, divided before its operators where it is longer than a line."""
    return [part] if len(part) <= width else _parts(part, "")


def _parts(text: str, comma: str) -> list[str]:
    """Return a bracket's contents, divided behind commas, or before operators where there are none."""
    found = [(place, character) for place, character, depth in _scan(text) if depth == 0]
    cuts = [place + 1 for place, character in found if character == comma]
    if not cuts:
        blanks = [place for place, character in found if character == " "]
        cuts = [place for place in blanks if text[place + 1 :].startswith(_OPERATORS)]
    return [part for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if (part := text[a:b].strip())]
