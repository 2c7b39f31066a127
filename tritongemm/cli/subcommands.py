"""The command `tritongemm`: a subcommand's module is imported when it is chosen."""

import argparse
import importlib
import sys
from typing import Any

from tritongemm.cli.arguments import COMMANDS, Parser


def main() -> int:
    """Run the subcommand that the command line names; the exit status is one of `cli.shell`."""
    words = sys.argv[1:]
    status: int = _module(parser(Parser).parse_args(words[:1] or ["--help"]).command).main(words[1:])
    return status


class _Formatter(argparse.HelpFormatter):
    """A formatter that has room for the names of the commands, whose indent argparse does not count."""

    def format_help(self) -> str:
        """Return the help text."""
        self._action_max_length += 2
        return super().format_help()


def parser(parser_class: Any) -> Parser:
    """Return the parser of the command; `parser_class` makes that of a subcommand from its name in ``prog``."""
    p = Parser("tritongemm", description="A GEMM autotuner for AMD and NVIDIA GPUs.", formatter_class=_Formatter)
    p.epilog = "tritongemm COMMAND --help lists the options of a command."
    commands = p.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=parser_class)
    for name, does in COMMANDS.items():
        commands.add_parser(name, help=f"{does[0].lower()}{does[1:].rstrip('.')}")
    return p


def full_parser() -> Parser:
    """Return the parser of the command with all options of all subcommands, whose modules are imported."""
    return parser(lambda prog, **_: _module(prog.split()[-1]).parser())


def _module(name: str) -> Any:
    return importlib.import_module(f"tritongemm.cli.{name.replace('-', '_')}")
