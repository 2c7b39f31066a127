import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch, owned: Mapping[Path, tuple[int, int | None]], gid: int = 0) -> None:
    """Make files look as if they were of others.

    Args:
        monkeypatch: undoes it.
        owned: owner and mode by path. The owner is also that of all below, and the mode only of what is named; None
            leaves it. Above all else stands ``/``.
        gid: group of everything.
    """

    def seen_as(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def status(target: Any, *args: Any, **options: Any) -> os.stat_result:
            found = real(target, *args, **options)
            path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(target))
            place = next((p for p in (path, *path.parents) if p in owned), None)
            if place is None:
                return found
            uid, mode = owned[place]
            if mode is None or place != path:
                # what pytest's folders are below is no matter of the test
                mode = 0o755 if place == Path("/") else stat.S_IMODE(found.st_mode)
            return os.stat_result((stat.S_IFMT(found.st_mode) | mode, *found[1:4], uid, gid, *found[6:10]))

        return status

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, seen_as(getattr(os, name)))
