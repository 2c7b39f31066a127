"""Text for people: no commands to the terminal in it, and no more of it than can be read."""

from hypothesis import given
from hypothesis import strategies as st

from tritongemm.system.printable import TEXT_CHARACTERS, WORD_CHARACTERS, printable


def test_usual_text_stays_as_it_is() -> None:
    for text in ("", "1.5 us, [bold]", "…/größe.yaml:key:", "a" * WORD_CHARACTERS):
        assert printable(text) == text


def test_commands_to_a_terminal_are_shown() -> None:
    assert printable("a\x1b[31mb\r\n\x9b\u202e\udcff\0") == "a\\x1b[31mb\\r\\n\\x9b\\u202e\\udcff\\x00"


def test_a_long_word_loses_its_middle() -> None:
    text = printable(f"M must be a number, not {'1' * 100_000}z; write 16")
    assert text.startswith("M must be a number, not 111") and text.endswith("1z; write 16")
    assert text.count("…") == 1 and len(text) < WORD_CHARACTERS + 50


@given(st.text(max_size=50), st.integers(0, 2000))
def test_it_is_short_and_prints(text: str, times: int) -> None:
    shown = printable(text * times)
    assert shown.isprintable() and len(shown) <= TEXT_CHARACTERS
    assert all(len(word) <= WORD_CHARACTERS for word in shown.split(" "))
