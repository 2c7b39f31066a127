"""Readers of all formats, and the toy of docs/plugins as one of them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import ROOT
from tritongemm import formats
from tritongemm.core.record import Record
from tritongemm.formats import Defaults, FormatRow
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format

TOY = ROOT / "tests" / "support" / "toys" / "format_toy.py"


@contextmanager
def toy_format(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The toy's file, dropped into formats/ from a folder of its own; its name."""
    shutil.copy(TOY, folder / "toy_csv.py")
    (folder / "_shared.py").write_text("")
    patch.setattr(formats, "__path__", [*formats.__path__, str(folder)])
    try:
        yield "toy_csv"
    finally:
        sys.modules.pop("tritongemm.formats.toy_csv", None)
        registry.forget()


def read_text(text: str, path: Path = Path("rows.yaml"), defaults: Defaults | None = None) -> list[FormatRow]:
    """The rows of a text, read by the one format that claims it."""
    (reader,) = (f for f in registry.every(Format) if f.recognises(path, text))
    return reader.read(path, text, defaults or Defaults())


def records_of(text: str) -> list[Record | None]:
    """The records of a text, in its order."""
    return [row.record for row in read_text(text)]


def write_text(*records: Record) -> str:
    """Our results file with these records."""
    return formats.results_format().write(records)
