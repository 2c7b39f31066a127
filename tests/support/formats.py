from pathlib import Path

from tests.support.nouns import Defaults, Format, FormatRow, Record, registry
from tritongemm import formats


def read_text(text: str, path: Path = Path("rows.yaml"), defaults: Defaults | None = None) -> list[FormatRow]:
    """The rows of a text, read by the one format that claims it."""
    (reader,) = (f for f in registry.every(Format) if f.recognises(path, text))
    return reader.read(path, text, defaults or Defaults())


def write_text(*records: Record) -> str:
    """Our results file with these records."""
    return formats.results_format().write(records)
