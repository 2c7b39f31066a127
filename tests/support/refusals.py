from collections.abc import Callable
from typing import Any

import pytest

from tritongemm.core.errors import InputError

Errors = type[BaseException] | tuple[type[BaseException], ...]


def refuses(words: str, call: Callable[..., object], /, *given: Any, **named: Any) -> None:
    """Asserts that a call raises an InputError with these words, a regular expression."""
    fails(InputError, words, call, *given, **named)


def fails(error: Errors, words: str, call: Callable[..., object], /, *given: Any, **named: Any) -> None:
    """Asserts that a call raises this error with these words, a regular expression."""
    with pytest.raises(error, match=words or None):
        call(*given, **named)
