"""The command line of `tritongemm capture`: a program is run, and what it multiplies is written."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tritongemm.cli import arguments, shell
from tritongemm.core.errors import InputError
from tritongemm.system import settings
from tritongemm.workloads.capturing import child_processes
from tritongemm.workloads.capturing.workload_file import open_file


@shell.command
def main(argv: Sequence[str]) -> int:
    """Check the arguments, and become the program; the exit status is its own, or `REFUSED` of `cli.shell`."""
    args = parser().parse_args(argv)
    words: list[str] = args.module if args.module is not None else args.program
    if not words:
        raise InputError("there is no program to run; name a script, or a module after -m")
    _require_program(words[0], args.module is not None)
    if args.output or not settings.capture_files():
        settings.capture_in_children(Path(args.output or "shapes.yaml").absolute())
    for path in settings.capture_files():
        open_file(path)
    sys.stdout.flush()
    command = child_processes.command(words, args.module is not None)
    os.execv(command[0], command)


def parser() -> arguments.Parser:
    """Return the options of the command."""
    usage = "%(prog)s [-o FILE] {app.py | -m MODULE} [ARGUMENT ...]"
    p = arguments.Parser("tritongemm capture", usage=usage)
    p.add_argument("-o", "--output", type=arguments.output, metavar="FILE",
                   help="YAML of sizes, or, if it ends in .csv, AITER's untuned sizes; counts are added to those that "
                   "are there (shapes.yaml; none where AITER_TUNE_GEMM=1)")  # fmt: skip
    p.add_argument("-m", "--module", nargs=argparse.REMAINDER, metavar="MODULE",
                   help="run a module, as python -m does; all later arguments go to the program")  # fmt: skip
    p.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="run a script with its arguments")
    return p


def _require_program(name: str, is_module: bool) -> None:
    """Refuse a program that is not there."""
    if not is_module and not Path(name).exists():
        raise InputError(f"{name}: there is no such script")
    try:
        sys.path.insert(0, os.getcwd())  # as python -m does for the module that it runs
        if is_module and importlib.util.find_spec(name) is None:
            raise InputError(f"there is no module {name}")
    except (ImportError, ValueError):
        raise InputError(f"there is no module {name}") from None
    finally:
        sys.path.pop(0)
