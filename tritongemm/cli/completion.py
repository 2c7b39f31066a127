"""The command line of `tritongemm completion`: a script with which a shell completes commands and options."""

import argparse
from collections.abc import Iterator, Sequence

from tritongemm.cli import arguments, shell, subcommands
from tritongemm.core.errors import UnavailableError

_FILES = (arguments.path, arguments.output, arguments.output_file)


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    name = parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        raise UnavailableError("shtab writes these scripts: pip install 'tritongemm[completion]'") from None
    full = subcommands.full_parser()
    for action in _actions(full):
        if action.type in _FILES or action.type is arguments.output_folder:
            action.complete = shtab.DIRECTORY if action.type is arguments.output_folder else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(full, name))
    return shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser(
        "tritongemm completion",
        epilog="bash: tritongemm completion bash > ~/.local/share/bash-completion/completions/tritongemm",
    )
    p.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    return p


def _actions(p: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all actions of a parser and of those below it."""
    for action in p._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
