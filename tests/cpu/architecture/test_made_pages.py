import re
import shlex

import pytest

from scripts.pages import options, picture, tutorial
from tests.cpu.architecture import doc_pages
from tests.support import ROOT

# At the start of a line of code, perhaps behind variables, without what the shell redirects.
COMMAND = re.compile(r"(?m)^(?:    |\$ )?(?:[A-Z_]+=\S+ )*(?P<command>tritongemm [a-z][^>\n]*)")


def test_pages_have_the_options_commands_and_blocks_that_there_are() -> None:
    assert (ROOT / options.PAGE).read_text(encoding="utf-8") == options.text(), "run scripts/make_pages options"
    parsers, refused, count = {parser.prog: parser for parser in options.parsers()}, [], 0
    for page in (*doc_pages.PAGES, ROOT / "examples/README.md"):
        for found in COMMAND.finditer(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            words = shlex.split(found["command"], comments=True)
            length = 3 if " ".join(words[:3]) in parsers else 2
            count += 1
            try:
                parsers[" ".join(words[:length])].parse_args(words[length:])
            except (KeyError, SystemExit):
                refused.append(f"{page.name}: {found['command']}")
    assert count > 50 and not refused
    steps, transcript = ((ROOT / name).read_text(encoding="utf-8") for name in (tutorial.PAGE, picture.TRANSCRIPT))
    measured = {line for block in doc_pages.blocks(steps, "text") for line in block.splitlines()}
    assert measured and measured <= {*transcript.splitlines()}


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
