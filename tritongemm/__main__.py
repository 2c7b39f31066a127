"""The entry point of `tritongemm` and `python -m tritongemm`; `tritongemm.cli.subcommands` is the command."""

from __future__ import annotations

import sys

from tritongemm.system import import_path, stop_signals


def main(command: str = "tritongemm.cli.subcommands:main") -> int:
    """Run a command, ``module:function``, as this entire process; return its exit status."""
    stop_signals.end_at_once()  # while the rest is imported
    from tritongemm.cli import shell

    return shell.run(command)


if __name__ == "__main__":
    import_path.leave_out_current_folder()
    sys.exit(main())
