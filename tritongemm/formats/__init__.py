"""File formats, our own and foreign ones: one file each. What they share with their callers is in `_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.formats._rows import EXAMPLE, problem_of, text_of

if TYPE_CHECKING:
    from tritongemm.formats.native_yaml import NativeYaml

__all__ = ["EXAMPLE", "Defaults", "FormatRow", "ResultsFile", "problem_of", "results_format", "text_of"]


def results_format() -> NativeYaml:
    """The format in which our own results are kept."""
    from tritongemm.formats.native_yaml import NativeYaml  # reads YAML, which a run that only serves may never need
    from tritongemm.plugins import registry

    found: NativeYaml = registry.get(NativeYaml, "native_yaml")
    return found
