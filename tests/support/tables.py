"""Tests of many small cases: pytest takes longer to begin and end a test than most cases do."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Makes one test of all cases, given as to `pytest.mark.parametrize`; what fails names its case.

    For cases that take milliseconds. Each has its own `tmp_path` and `monkeypatch`, and what earlier ones wrote is no
    longer in `capsys` and `caplog`; it shares all other fixtures.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    return lambda test: _of_all(test, wanted, list(cases))


def cases(*rows: Any) -> Callable[[Test], Test]:
    """Makes one test of all rows as `each` does: a row has the values of the test's positional-only parameters."""
    return lambda test: _of_all(*_by_name(test), rows)


def apart(*rows: Any, ids: Any = None) -> Callable[[Test], Test]:
    """Makes a test of each row, for rows that take long; otherwise as `cases`. `ids` are those of parametrize."""

    def decorate(test: Test) -> Test:
        by_name, wanted = _by_name(test)
        return pytest.mark.parametrize(", ".join(wanted), rows, ids=ids)(by_name)

    return decorate


def heavy(*row: Any) -> Any:
    """A row of `apart` that the quick tests leave out."""
    return pytest.param(*row, marks=pytest.mark.heavy)


def _by_name(test: Test) -> tuple[Test, list[str]]:
    """A test whose positional-only parameters can be given by name, as pytest does, and what they are called."""
    signature = inspect.signature(test)
    wanted = [name for name, one in signature.parameters.items() if one.kind is one.POSITIONAL_ONLY]

    @functools.wraps(test)
    def call(**given: Any) -> None:
        test(*[given.pop(name) for name in wanted], **given)

    named = [one.replace(kind=one.KEYWORD_ONLY) for one in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return call, wanted


def _of_all(test: Test, wanted: list[str], cases: Iterable[Any]) -> Test:
    rows = [(case,) if len(wanted) == 1 else tuple(case) for case in cases]
    assert rows and all(len(row) == len(wanted) for row in rows)

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        for place, row in enumerate(rows):
            given = dict(zip(wanted, row, strict=True))
            with pytest.MonkeyPatch.context() as patch:
                own = fixtures | ({"monkeypatch": patch} if "monkeypatch" in fixtures else {})
                if "tmp_path" in fixtures:
                    own["tmp_path"] = fixtures["tmp_path"] / str(place)
                    own["tmp_path"].mkdir()
                if "capsys" in fixtures:
                    fixtures["capsys"].readouterr()
                if "caplog" in fixtures:
                    fixtures["caplog"].clear()
                try:
                    test(**own, **given)
                except BaseException as error:
                    if sys.version_info >= (3, 11):
                        error.add_note(f"case {str(given)[:400]}")
                    raise

    signature = inspect.signature(test)
    left = [one for name, one in signature.parameters.items() if name not in wanted]
    run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return run
