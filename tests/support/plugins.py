import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import FileFinder
from pathlib import Path
from typing import TypeVar

import pytest

from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Plugin

P = TypeVar("P", bound=Plugin)
TOYS = Path(__file__).parent / "toys"
# A child process reads this at its start, so that it finds the plug-in as well.
_SITE = "import importlib\nimportlib.import_module({package!r}).__path__.append({folder!r})\n"


@contextmanager
def dropped(kind: type[Plugin], file: Path | str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """A plug-in's file, found beside those of its kind for as long as the context lasts; its name."""
    path = file if isinstance(file, Path) else TOYS / f"{file}.py"
    place = folder / kind.__name__
    place.mkdir()
    shutil.copy(path, place)
    package = importlib.import_module(kind.package)
    patch.setattr(package, "__path__", [*package.__path__, str(place)])
    forget_plugins(place)
    try:
        yield path.stem
    finally:
        sys.modules.pop(f"{kind.package}.{path.stem}", None)
        vars(package).pop(path.stem, None)
        forget_plugins(place)


def each_with_toy(kind: type[P], toy: str) -> Callable[..., Iterator[P]]:
    """A fixture that is each plug-in of a kind, and the documented toy beside them."""

    @pytest.fixture(params=[*registry.names(kind), toy])
    def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[P]:
        with dropped(kind, toy, tmp_path, monkeypatch):
            yield registry.get(kind, request.param)

    return plugin


def show_to_children(folder: Path, patch: pytest.MonkeyPatch, *kinds: type[Plugin]) -> None:
    """Have processes that start from now on find what was `dropped` into a folder, too."""
    site = folder / "site"
    site.mkdir()
    text = "".join(_SITE.format(package=kind.package, folder=str(folder / kind.__name__)) for kind in kinds)
    (site / "sitecustomize.py").write_text(text)
    patch.syspath_prepend(str(site))


def forget_plugins(folder: Path) -> None:
    """Let the registry look for plug-ins anew, in a folder whose files changed too."""
    rescan(folder)
    registry.forget()


def rescan(folder: Path) -> None:
    """Have imports see what was just put into a folder.

    `importlib.invalidate_caches` would do so for all folders, and fails where a thread imports something meanwhile.
    """
    finder = sys.path_importer_cache.get(str(folder))
    if isinstance(finder, FileFinder):
        finder.invalidate_caches()
