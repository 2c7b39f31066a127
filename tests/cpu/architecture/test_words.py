"""Code, templates, tests and pages are in the field's words: a word of one author has a plain one in its place."""

import re
from pathlib import Path

import pytest

from tests.cpu.architecture.offenders import check
from tests.support import ROOT

# Private words, as regular expressions, with those to use in their places.
PLAIN = {
    "tells?|telling|told|untold": "report, say, distinguish", "lies?|lying": "is stored, is",
    "so many": "a number, n", "none of ours": "unsupported",
    "nobody|somebody|anybody": "no user, no process, another one",
    "whole(?! numb)|wholly": "complete, entire, full; an integer",
    "judges?|judged|judging|verdicts?": "decide, decision", "opponents?|contenders?": "competitor",
    "learned": "fitted", "strangers?": "another user", "doors?|houses?|roads?": "command, package, path",
    "fresh|freshly|afresh": "new", "asks? of|asked of": "request",
    "whoever|who serves|who computes": "whichever, what serves, a user who", "becomes? of|became of": "outcome",
    "be it|need be": "or, necessary", "workbench|sideline": "cache, set of operands",
}  # fmt: skip
PLAIN_IN_PAGES = {"lane": "device", "scratch": "temporary memory", "interop": "integration"}  # terms of compilers too
PARTS = ("tritongemm", "hip_ext", "codegen", "search_spaces", "templates", "benchmarks", "scripts", "tests", "docs")
TEXTS = (".py", ".j2", ".md", ".yaml", ".c", ".cpp", ".css", ".js", "")


def _words(text: str) -> str:
    """A text in small letters, with the words of identifiers apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


def _offences(path: Path, words: dict[str, str]) -> list[str]:
    wanted = re.compile("|".join(rf"\b({pattern})\b" for pattern in words))
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        for match in wanted.finditer(_words(line)):
            plain = list(words.values())[(match.lastindex or 1) - 1]
            found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {plain}")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_words_are_plain(part: str) -> None:
    words = PLAIN | (PLAIN_IN_PAGES if part == "docs" else {})
    found = [path for path in (ROOT / part).rglob("*") if path.suffix in TEXTS and path.is_file()]
    files = [path for path in found if "__pycache__" not in path.parts and "tests/data" not in str(path)]
    files = [path for path in files if path != Path(__file__)]
    if part == "docs":
        files += [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    check("words are plain", (offence for path in files for offence in _offences(path, words)), "others say the same")


def test_the_check_sees_words_of_identifiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("class ToldFile: ...\nwhole_numbers = 1\n")
    assert _offences(tmp_path / "a.py", PLAIN) == ["a.py:1: 'told': write report, say, distinguish"]
