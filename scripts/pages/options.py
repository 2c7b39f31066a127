"""The page of all options, made from the parsers of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tritongemm.cli import subcommands

PAGE = Path("docs/reference/options.md")
HEAD = """\
# Options of every command

Made from the commands' own parsers by `scripts/make_pages`, so that it says what `--help` says. What the options do
together is in [commands](commands.md).
"""
EXAMPLES = {
    "tritongemm tune": "tritongemm tune --gemm_size_file sizes.yaml --compare -dtype_a bf16 -o tuned.yaml",
    "tritongemm capture": "tritongemm capture -o shapes.yaml app.py",
    "tritongemm optimize": "tritongemm optimize job.log -o tunings --thr 1",
    "tritongemm lookup": "tritongemm lookup tuned.yaml -m 16 -n 4096 -k 4096 -dtype_a bf16",
    "tritongemm convert": "tritongemm convert tuned.yaml -o bf16_tuned_gemm.csv",
    "tritongemm check": "tritongemm check tuned.yaml --repair",
    "tritongemm compare-server": "tritongemm compare-server --table tuned.yaml -- vllm serve MODEL --port 8000",
    "tritongemm report": "tritongemm report tuned.yaml -o report.html",
    "tritongemm library build": "tritongemm library build tuned.yaml -o kernels.zip",
    "tritongemm library merge": "tritongemm library merge a.zip b.zip -o kernels.zip",
    "tritongemm library list": "tritongemm library list kernels.zip",
    "tritongemm library verify": "tritongemm library verify kernels.zip",
    "tritongemm export": "tritongemm export tuned.yaml -o kernels",
    "tritongemm launch-plan": "tritongemm launch-plan -m 16 -n 4096 -k 4096 --target gfx942 -o plan",
    "tritongemm gradlib": "tritongemm gradlib -i bf16_untuned_gemm.csv -o bf16_tuned_gemm.csv",
    "tritongemm completion": "tritongemm completion bash",
}


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(line for parser in parsers() for line in _section(parser))])


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command that does something, in the order of ``tritongemm --help``."""
    waiting: list[argparse.ArgumentParser] = [subcommands.full_parser()]
    while waiting:
        parser = waiting.pop(0)
        below = [one for action in _subparsers(parser) for one in action.choices.values()]
        waiting[:0] = below
        if not below:
            yield parser


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _section(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    if parser.description:
        yield f"{' '.join(parser.description.split())}\n"
    yield f"    {EXAMPLES[parser.prog]}\n"
    for group in parser._action_groups:
        rows = [_row(parser, action) for action in group._group_actions if _is_listed(action)]
        if rows:
            yield from (f"| {_cell(group.title or '')} | |", "| --- | --- |", *rows, "")


def _is_listed(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and action.dest not in ("help", "version")


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    described = formatter._expand_help(action) if action.help else ""
    return f"| {', '.join(f'`{_cell(name)}`' for name in names)} | {_cell(described)} |"


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
