"""Makes text from files, options and devices safe to print, and shortens it to a readable length."""

import re

WORD_CHARACTERS = 300  # The longest config names and usual paths stay complete.
TEXT_CHARACTERS = 4000

_LONG_WORD = re.compile(rf"[^ ]{{{WORD_CHARACTERS + 1},}}")


def printable(text: str, limit: int = TEXT_CHARACTERS) -> str:
    r"""Return the text on one line, with nothing in it that a terminal takes for a command.

    Control characters, escape sequences, line ends and marks that turn the direction of writing are written as Python
    writes them, e.g. ``\x1b``. Of a word of more than `WORD_CHARACTERS`, and of a complete text of more than `limit`
    characters, the middle is left out.
    """
    if len(text) > 4 * limit:  # so that the work is bounded too
        text = _shortened(text, 4 * limit)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _shortened(_LONG_WORD.sub(lambda word: _shortened(word[0], WORD_CHARACTERS), text), limit)


def _shortened(text: str, limit: int) -> str:
    """Return the beginning and the end of a text, which have more information than its middle."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 1]}…{text[-end:]}"
