"""The options of a search, and of how its candidates are measured."""

from __future__ import annotations

import argparse

from tritongemm.cli import arguments, servers
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import MOST_GROUPS
from tritongemm.numerics.random_inputs import INITS
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Strategy, Timer


def add_search_options(p: argparse.ArgumentParser) -> None:
    """Add the options that say what is tried."""
    g = p.add_argument_group("search")
    _add_extent(g)
    _add_rivals(g)
    _add_server_tables(g)


def _add_extent(g: argparse._ArgumentGroup) -> None:
    """Add the options that say which configs are tried, and how many."""
    g.add_argument(
        "--strategy",
        default=None,
        choices=registry.names(Strategy),
        help="which configs are tried (default: guided on a GPU, exhaustive where nothing can be timed)",
    )
    g.add_argument(
        "--budget",
        type=arguments.budget,
        default=(0, 0.0),
        metavar="N|Ss",
        help="try at most N configs of each size (default: the strategy decides; exhaustive tries all that are not "
        "pruned); or, as 90s, try nothing new after so many seconds of the run and race what there is",
    )
    g.add_argument(
        "--finalists",
        type=arguments.whole(1, 10_000),
        default=12,
        metavar="N",
        help="verify and race the best N candidates (default %(default)s)",
    )
    g.add_argument(
        "--max-split",
        type=arguments.whole(1, 10_000),
        default=0,
        metavar="N",
        help="let at most N programs share a tile's K loop; 1 for no splits (default: as the search space has them)",
    )


def _add_rivals(g: argparse._ArgumentGroup) -> None:
    """Add the options that say who else races."""
    g.add_argument(
        "--libtype",
        default=None,
        metavar="B,…",
        help="the backends that race with the baseline: all, or names with commas between, of those listed below "
        "(default: all whose kernels compile quickly)",
    )
    g.add_argument(
        "--algorithms",
        type=arguments.whole(0, 100_000),
        default=48,
        metavar="N",
        help="time only the N algorithms that a vendor's library guesses best for each size; 0 for all of the hundreds "
        "there are (default %(default)s)",
    )
    g.add_argument(
        "--min-gain",
        type=arguments.number(0, 1000),
        default=0.5,
        metavar="PERCENT",
        help="keep the library unless a candidate is this much faster (default %(default)s)",
    )


def _add_server_tables(g: argparse._ArgumentGroup) -> None:
    """Add the options of the tables that servers read."""
    g.add_argument(
        "--for",
        dest="server",
        type=_server,
        metavar="SERVER",
        help="vllm or sglang: race this server's own Triton kernel, or where it is not installed ours with the same "
        "tiles, beside what it runs today, for the tables that it reads; without -m at every M of such a table",
    )
    g.add_argument(
        "--top-k",
        type=arguments.whole(1, MOST_GROUPS),
        default=None,
        metavar="E",
        help="with --for and --groups: each token goes to so many experts; -m is tokens, -n the inner size of an "
        "expert, -k the hidden size",
    )


def _server(text: str) -> str:
    """The name of a server whose kernels a format sets.

    Raises:
        argparse.ArgumentTypeError: there is none of that name.
    """
    try:
        return servers.server_format(text).server.lower()
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_measuring_options(p: argparse.ArgumentParser) -> None:
    """Add the options that say how it is timed and checked."""
    g = p.add_argument_group("measuring")
    _add_clock(g)
    _add_operands_and_checks(g)


def _add_clock(g: argparse._ArgumentGroup) -> None:
    """Add the options that say how launches are timed."""
    g.add_argument(
        "--profiler",
        default=None,
        choices=("auto", *registry.names(Timer)),
        help="the clock, one of those listed below (default: events); auto takes the GPU's own that is here",
    )
    g.add_argument(
        "--iters",
        type=arguments.whole(1, 1_000_000),
        default=200,
        metavar="N",
        help="time at least N launches of a finalist (default %(default)s)",
    )
    g.add_argument(
        "--warmup",
        type=arguments.whole(0, 1_000_000),
        default=5,
        metavar="N",
        help="launch it N times before that (default %(default)s)",
    )
    g.add_argument("--no-warmup", dest="warmup", action="store_const", const=0, help="the same as --warmup 0")


def _add_operands_and_checks(g: argparse._ArgumentGroup) -> None:
    """Add the options that say what operands hold, and when a candidate is given up."""
    g.add_argument(
        "--init-type", default="randn", choices=INITS, help="what the operands contain (default %(default)s)"
    )
    g.add_argument(
        "--rotating-tensor",
        type=arguments.whole(-1, 1 << 20),
        default=-1,
        metavar="MB",
        help="rotate the operands through so much memory, so that they are not in a cache (default: three times the "
        "last-level cache)",
    )
    g.add_argument(
        "--errRatio",
        "--err-ratio",
        dest="err_ratio",
        type=arguments.number(0, 1, below=True),
        default=0.0,
        metavar="R",
        help="this share of C's elements may be outside the tolerance on the GPU (default 0: none may); even so, none "
        "may be NaN or off by half of |reference| + rms",
    )
    g.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=60.0,
        metavar="S",
        help="give one compile, or one candidate on the GPU, at most S seconds (default 60)",
    )
