"""The entry point of `tritongemm` and `python -m tritongemm`; `tritongemm.cli.subcommands` is the command."""

from __future__ import annotations

import sys
from functools import partial

from tritongemm.system import import_path

if __name__ == "__main__":
    import_path.leave_out_current_folder()

from tritongemm.cli import shell

main = partial(shell.run, "tritongemm.cli.subcommands:main")

if __name__ == "__main__":
    sys.exit(main())
