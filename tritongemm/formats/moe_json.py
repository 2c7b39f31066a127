"""Format: tables of tiles for mixtures of experts other than those written here, recognised and left as they are.

``E=128,N=768,device_name=NVIDIA_H200.json``: E experts, each N wide, without scales or with others than those of
blocks. No row has K or how many experts a token goes to, so none is a size to tune.
"""

import re
from pathlib import Path
from typing import NoReturn

from tritongemm.core.format_row import Defaults
from tritongemm.formats._expert_tables import claims, refuse_sizes
from tritongemm.formats._json_members import read_members
from tritongemm.plugins.contracts import Format

_NAME = re.compile(r"E=[0-9]+,N=[0-9]+,device_name=[^,]*(?:,[a-z_]+=[^=]*)*\.json")


class MoeJson(Format):
    """Tables of mixtures of experts."""

    title = "a table of tiles of a mixture of experts of vLLM or SGLang, E=..,N=..,device_name=...json"
    suffixes = (".json",)

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether a file has the name of such a table, and holds a JSON object."""
        written = any(claims(path.name, shape) for shape in (",block_shape=[{},{}]", ",block_shape=[{}, {}]"))
        return not written and _NAME.fullmatch(path.name) is not None and text.lstrip().startswith("{")

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> NoReturn:
        """Refuse the table, as none of its rows is a size."""
        read_members(path, text)
        refuse_sizes(path)
