"""The door of `python -m tritongemm`, which has nothing but the version; each command has a door of its own."""

from __future__ import annotations

from tritongemm.system import import_path

if __name__ == "__main__":
    import_path.leave_out_current_folder()

from tritongemm.cli import arguments
from tritongemm.system.version import VERSION


def main() -> None:
    """Print the version, or where the commands are."""
    p = arguments.Parser(
        prog="python -m tritongemm", description="Commands are python -m tritongemm.tune and others: docs/commands.md."
    )
    p.add_argument("--version", action="version", version=VERSION)
    p.parse_args()
    p.print_help()


if __name__ == "__main__":
    main()
