"""Parses Python source text, one text at a time."""

import ast
import threading

_ONE_AT_A_TIME = threading.Lock()


def parse(text: str) -> ast.Module:
    """Return the tree of Python source text.

    CPython 3.11 counts how deep trees are for all threads together, and raises SystemError where two build one at once.
    """
    with _ONE_AT_A_TIME:
        return ast.parse(text)
