"""The documentation as text: its pages, their links and anchors, and the names of the project that they mention."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tritongemm
from tests.support import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

_FENCE = re.compile(r"(?ms)^(?P<mark>```+)[^\n]*\n(?P<code>.*?)^(?P=mark)\s*$")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#{1,6} +(?P<text>.+?) *#*$")
_SNIPPET = re.compile(r'(?m)^\s*--8<-- "(?P<path>[^"]+)"\s*$')
_PATH = re.compile(
    r"(?<![\w./-])(?P<path>(?:tritongemm|benchmarks|codegen|docs|examples|hip_ext|scripts|search_spaces|templates|tests|\.ci)/[\w./*<>-]*)"
)
_MODULE = re.compile(r"(?<![\w./])tritongemm(?:\.\w+)+")
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_OTHERS = "HIP_ONLINE_TUNING|VLLM_BATCH_INVARIANT|HF_[A-Z_]+|C[A-Z]+_DIR"
_VARIABLE = re.compile(rf"\b(?:TRITONGEMM_[A-Z_]+|AITER_[A-Z_]+|{_OTHERS})\b")


@dataclass(frozen=True)
class Mention:
    page: str  # its path from the root
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def links(text: str) -> Iterator[tuple[int, str]]:
    for match in _LINK.finditer(_SPAN.sub(_blank, _FENCE.sub(_blank, text))):
        yield _line(text, match.start()), match["target"]


def anchors(text: str) -> set[str]:
    """What can be linked to in a page: each heading's words in small letters, with dashes, numbered if repeated."""
    found: set[str] = set()
    for match in _HEADING.finditer(_FENCE.sub(_blank, text)):
        plain = _LINK.sub(lambda link: link["text"], match["text"]).replace("`", "").replace("*", "")
        words = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        name, count = words, 0
        while name in found:
            count += 1
            name = f"{words}_{count}"
        found.add(name)
    return found


def snippets(text: str) -> Iterator[tuple[int, str]]:
    """Files that a page includes, with the lines."""
    for match in _SNIPPET.finditer(text):
        yield _line(text, match.start()), match["path"]


def blocks(text: str, language: str) -> list[str]:
    """The contents of the blocks in one language."""
    return [match["code"] for match in _FENCE.finditer(text) if match[0].startswith(f"{match['mark']}{language}\n")]


def code(text: str) -> Iterator[tuple[int, str]]:
    """Each line of code of a page, in a block or in a sentence, with its number."""
    for match in _FENCE.finditer(text):
        first = _line(text, match.start("code"))
        yield from enumerate(match["code"].splitlines(), first)
    for match in _SPAN.finditer(_FENCE.sub(_blank, text)):
        yield _line(text, match.start()), match[1]


def prose(text: str) -> list[str]:
    """Lines of sentences: no headings, tables, lists of code or blocks."""
    lines = _FENCE.sub(_blank, text).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "|"))]


def mentioned_paths(page: str, text: str) -> Iterator[Mention]:
    yield from _mentions(page, text, _PATH)


def mentioned_modules(page: str, text: str) -> Iterator[Mention]:
    yield from _mentions(page, text, _MODULE)


def mentioned_options(page: str, text: str) -> Iterator[Mention]:
    yield from _mentions(page, text, _OPTION)


def mentioned_variables(page: str, text: str) -> Iterator[Mention]:
    """Environment variables that a page names, also in its sentences."""
    for match in _VARIABLE.finditer(text):
        yield Mention(page, _line(text, match.start()), match[0])


def path_exists(path: str) -> bool:
    """Whether a path from the root is there; ``<name>`` and ``*`` stand for any name."""
    pattern = re.sub(r"<\w+>", "*", path).rstrip("/.")
    return any(ROOT.glob(pattern)) if "*" in pattern else (ROOT / pattern).exists()


def member_exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, or defined at the top of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if file.is_file():
            names = tritongemm.__all__ if count == 1 else _top_names(file)
            return count == len(parts) or (count == len(parts) - 1 and parts[-1] in names)
    return False


@cache
def _top_names(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def parser_options(file: Path) -> set[str]:
    """Options that a file's text gives to `add_argument`, ``_`` written as ``-``."""
    found: set[str] = set()
    for call in re.finditer(r"add_argument\(\s*(?P<names>(?:f?\"-[^\"]*\",?\s*)+)", file.read_text()):
        for name in re.findall(r"\"(-[^\"{]*)\"", call["names"]):
            found.add(dashed(name))
    return found


def dashed(option: str) -> str:
    return option.replace("_", "-")


def _mentions(page: str, text: str, pattern: re.Pattern[str]) -> Iterator[Mention]:
    for number, line in code(text):
        for match in pattern.finditer(line):
            yield Mention(page, number, match[0])


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
