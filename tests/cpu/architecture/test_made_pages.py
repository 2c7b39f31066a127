"""Pages that are made from the program are as it would make them now."""

from __future__ import annotations

import re
import shlex

import pytest

from scripts.pages import options, picture, tutorial
from tests.cpu.architecture import doc_pages
from tests.support import ROOT


def test_the_page_of_options_is_that_of_the_parsers() -> None:
    assert (ROOT / options.PAGE).read_text(encoding="utf-8") == options.text(), "run scripts/make_pages options"


def test_examples_of_commands_are_accepted() -> None:
    parsers = {parser.prog: parser for parser in options.parsers()}
    assert parsers.keys() == options.EXAMPLES.keys()
    for prog, example in options.EXAMPLES.items():
        parsers[prog].parse_args(shlex.split(example)[len(prog.split()) :])


def test_commands_of_the_tutorial_are_accepted() -> None:
    page = (ROOT / tutorial.PAGE).read_text(encoding="utf-8")
    parsers = {parser.prog.split()[-1]: parser for parser in options.parsers()}
    words = [shlex.split(command) for command in tutorial.commands(page)]
    for _, name, *arguments in (one for one in words if one[0] == "tritongemm"):
        parsers[name].parse_args(arguments)
    measured = {line for block in doc_pages.blocks(page, "text") for line in block.splitlines()}
    assert measured <= {*(ROOT / "docs/tutorial/first-run.md").read_text(encoding="utf-8").splitlines()}


@pytest.mark.heavy  # each of its commands is a test of its own
def test_the_tutorial_prints_what_its_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert tutorial.PAGE.read_text(encoding="utf-8") == tutorial.text(), "run scripts/make_pages tutorial"


def test_the_picture_of_a_terminal_shows_the_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and places: other versions of rich write the frame in another way."""
    monkeypatch.chdir(ROOT)
    drawn, now = ((ROOT / picture.PAGE).read_text(encoding="utf-8"), picture.text())
    lines = re.compile(r"<text [^>]*>[^<]*</text>")
    assert lines.findall(drawn) == lines.findall(now) and len(lines.findall(now)) > 10, "run scripts/make_pages picture"
    assert not re.search(r"url\((?!#)", drawn)
