"""Format: the YAML of ROCm Triton's tune_gemm and tune_streamk, a list of maps of sizes or tuned configs.

Lists that have keys of ours as well belong to `native_yaml`. `_gemm_rows` says what each key means.
"""

from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, ResultsFile
from tritongemm.formats._gemm_rows import has_our_keys, read_rows
from tritongemm.formats._tensile_text import begins_logic
from tritongemm.formats._yaml_rows import is_row_list
from tritongemm.plugins.contracts import Format


class TuneGemmYaml(Format):
    """The YAML of tune_gemm, which has keys of its own alone."""

    title = "tune_gemm's YAML, a list of maps"
    suffixes = (".yaml", ".yml")

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether a file is a YAML list by its name or first character, and not of this project."""
        return is_row_list(path, text) and not has_our_keys(text) and not begins_logic(text)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return the rows of a file, in its order, with the keys that a user may add to a row."""
        found = read_rows(path, text, defaults)
        if not (found.rows or found.damaged):
            raise InputError(f"{path} holds an empty list")
        return found
