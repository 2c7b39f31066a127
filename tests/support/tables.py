"""Tests of many small cases: pytest takes longer to begin and end a test than most cases do."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test of all cases, given as to `pytest.mark.parametrize`; what fails names its case.

    For cases that take milliseconds. Each has its own `tmp_path` and `monkeypatch`, and what earlier ones wrote is no
    longer in `capsys` and `caplog`; it shares all other fixtures.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [(case,) if len(wanted) == 1 else tuple(case) for case in cases]
    assert rows and all(len(row) == len(wanted) for row in rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
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

    return decorate
