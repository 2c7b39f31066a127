"""Logs a line for each new size that is called, where TRITONGEMM_LOG or AITER's variable asks for it."""

import logging
from typing import Final

from tritongemm.core.served_call import Resolution
from tritongemm.system import settings
from tritongemm.system.printable import printable

_LOG: Final = logging.getLogger("tritongemm")
_MOST_KEYS = 8192  # Sizes that are remembered; sequences of any length must not fill the memory.


class ChoiceLog:
    """Logs once for each problem what serves it."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def log(self, key: str, device: str, resolution: Resolution, where: str) -> None:
        """Log a line, unless the environment does not ask for it, or an equal call was logged."""
        if not resolution.lasting or (key, device) in self._logged or not settings.logs_choices():
            return
        if len(self._logged) < _MOST_KEYS:
            self._logged.add((key, device))
            _show_lines()
            row = f"; {where}" if where else ""
            _LOG.info("%s", printable(f"{key} on {device}: {resolution}{row}"))


def _show_lines() -> None:
    """Show log lines that were asked for, also in a program that set up no logging."""
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())
        _LOG.setLevel(logging.INFO)
