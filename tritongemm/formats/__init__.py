"""File formats, our own and foreign ones: one file each. What they share with their callers is in `_rows`."""

from tritongemm.formats._rows import EXAMPLE, Defaults, FormatRow, text_of

__all__ = ["EXAMPLE", "Defaults", "FormatRow", "text_of"]
