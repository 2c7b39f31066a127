"""Pages that are made from the program are as it would make them now."""

from __future__ import annotations

import shlex

from scripts.pages import options
from tests.support import ROOT


def test_the_page_of_options_is_that_of_the_parsers() -> None:
    assert (ROOT / options.PAGE).read_text(encoding="utf-8") == options.text(), "run scripts/make_pages options"


def test_examples_of_commands_are_accepted() -> None:
    parsers = {parser.prog: parser for parser in options.parsers()}
    assert parsers.keys() == options.EXAMPLES.keys()
    for prog, example in options.EXAMPLES.items():
        parsers[prog].parse_args(shlex.split(example)[len(prog.split()) :])
