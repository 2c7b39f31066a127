"""The options of the search and of the measurement of its candidates."""

import argparse

from tritongemm.cli import arguments
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import MOST_GROUPS
from tritongemm.core.protocol import POWERS, MeasureProtocol
from tritongemm.numerics.random_inputs import INITS
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Strategy, Timer
from tritongemm.tune import servers
from tritongemm.tune.request import EFFORTS, SearchScope


def add_search_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the search."""
    g = p.add_argument_group("search")
    _add_extent(g)
    _add_rivals(g)
    _add_server_tables(g)


def _add_extent(g: argparse._ArgumentGroup) -> None:
    """Add the options that choose the configs to try, and their number."""
    levels = "; ".join(f"{name}: {level.summary}" for name, level in EFFORTS.items())
    g.add_argument(
        "--effort",
        choices=EFFORTS,
        default=SearchScope.effort,
        help=f"how much to try, where --strategy and --budget do not say it (default %(default)s); {levels}",
    )
    g.add_argument("--strategy", default=None, choices=registry.names(Strategy),
        help="search strategy (default: guided on a GPU, exhaustive without one)")  # fmt: skip
    g.add_argument("--budget", type=arguments.budget, metavar="N|Ss",
        help="try at most N configs per size; 0: as many as the strategy likes, for exhaustive all that are not "
        "pruned (default: by --effort); or, as 90s, try no new configs after that many seconds of the run and race "
        "the best so far")  # fmt: skip
    g.add_argument("--finalists", type=arguments.integer(1, 10_000), default=SearchScope.finalists, metavar="N",
        help="verify and race the best N candidates (default %(default)s, 6 where each core has 8 sizes)")  # fmt: skip
    g.add_argument("--invariant", nargs="?", const="kernels", type=_invariant, metavar="library",
        help="give a row the same bits at every M: kernels of a product add up in one order; =library (or cublas, "
        "hipblaslt): race algorithms of the library that agree too")  # fmt: skip
    g.add_argument("--invariant-runs", type=int, choices=(1, 2, 4, 8), default=1, metavar="R",
        help="with --invariant: add up K in R (2, 4 or 8) equal runs, and their sums pairwise, as ranks can that share "
        "the K of a layer")  # fmt: skip
    g.add_argument("--unconstrained", type=arguments.path, metavar="FILE",
        help="with --invariant: results of the same sizes in any order, against which the price is "
        "printed too")  # fmt: skip
    g.add_argument("--max-split", type=arguments.integer(1, 10_000), default=0, metavar="N",
        help="split K of a tile over at most N programs; 1: no split-K (default: the search space's "
        "values)")  # fmt: skip


def _invariant(text: str) -> str:
    """Return what races in an invariant run, beside kernels."""
    if text not in ("kernels", "library", "cublas", "hipblaslt"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of kernels, library, cublas and hipblaslt")
    return text if text == "kernels" else "library"


def _add_rivals(g: argparse._ArgumentGroup) -> None:
    """Add the options that choose the other backends of the race."""
    g.add_argument("--libtype", default=None, metavar="B,…",
        help="backends that race with the baseline: all, or comma-separated names from the list below (default: those "
        "whose kernels compile quickly)")  # fmt: skip
    g.add_argument("--algorithms", type=arguments.integer(0, 100_000), default=SearchScope.algorithms, metavar="N",
        help="screen the first N algorithms of a vendor's library for each size, in the order of its heuristic; 0 for "
        "all (hundreds) (default %(default)s)")  # fmt: skip
    g.add_argument("--min-gain", type=arguments.number(0, 1000), default=100 * SearchScope.margin, metavar="PERCENT",
        help="keep the baseline or a library's algorithm unless a kernel is this much faster (default "
        "%(default)s)")  # fmt: skip


def _add_server_tables(g: argparse._ArgumentGroup) -> None:
    """Add the options that tune the tables of vLLM and SGLang."""
    g.add_argument("--for", dest="server", type=_server, metavar="SERVER",
        help="vllm, sglang or vllm-invariant: tune the tables that this server reads, by racing its own Triton kernel, "
        "or if it is not installed ours with the same tiles, with the config it uses today; without -m for every M "
        "of its tables")  # fmt: skip
    g.add_argument("--top-k", type=arguments.integer(1, MOST_GROUPS), default=None, metavar="E",
        help="with --for and --groups: the number of experts per token; -m is tokens, -n the inner size of an expert, "
        "-k the hidden size")  # fmt: skip


def _server(text: str) -> str:
    """Return the name of a server for whose kernels a format writes tables."""
    try:
        return servers.server_format(text).server.lower()
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_measuring_options(p: argparse.ArgumentParser) -> None:
    """Add the options of timing and verification."""
    g = p.add_argument_group("measuring")
    _add_clock(g)
    _add_operands_and_checks(g)


def _add_clock(g: argparse._ArgumentGroup) -> None:
    """Add the options of timing."""
    g.add_argument("--profiler", default=None, choices=("auto", *registry.names(Timer)),
        help="timer, from the list below (default: events); auto: cupti or rocprofiler, whichever is "
        "available")  # fmt: skip
    g.add_argument("--iters", type=arguments.integer(1, 1_000_000), default=MeasureProtocol.iters, metavar="N",
        help="time at least N launches of a finalist (default %(default)s)")  # fmt: skip
    g.add_argument("--warmup", type=arguments.integer(0, 1_000_000), default=MeasureProtocol.warmup, metavar="N",
        help="untimed launches of a finalist before the timed ones (default %(default)s)")  # fmt: skip
    g.add_argument("--power", choices=POWERS, default=POWERS[0],
        help="clock at which products race that heat the GPU (default %(default)s): that after rests, or "
        "the one to which its power limit holds a long job, with the times after rests beside")  # fmt: skip
    g.add_argument("--no-warmup", dest="warmup", action="store_const", const=0, help="the same as --warmup 0")


def _add_operands_and_checks(g: argparse._ArgumentGroup) -> None:
    """Add the options of the operands, the tolerance, the compilers and the time limit."""
    g.add_argument("--init-type", default="randn", choices=INITS, help="values of the operands (default %(default)s)")
    g.add_argument("--rotating-tensor", type=arguments.integer(-1, 1 << 20), default=-1, metavar="MB",
        help="rotate the operands through this much memory, so that they are not in the cache (default: three times "
        "the last-level cache)")  # fmt: skip
    g.add_argument("--errRatio", "--err-ratio", dest="err_ratio", type=arguments.number(0, 1, below=True), default=0.0,
        metavar="R",
        help="share of C's elements that may be outside the tolerance on the GPU (default 0); none may be NaN or off "
        "by half of |reference| + rms")  # fmt: skip
    arguments.add_compiling(g, "one compile, or of one candidate on the GPU,")


def read_search(args: argparse.Namespace) -> SearchScope:
    """Return the values of `add_search_options`."""
    return SearchScope(
        effort=args.effort,
        strategy=args.strategy,
        budget=args.budget,
        finalists=args.finalists,
        max_split=args.max_split,
        libtype=args.libtype,
        algorithms=args.algorithms,
        margin=args.min_gain / 100,
        server=args.server,
        top_k=args.top_k,
    )


def read_protocol(args: argparse.Namespace) -> MeasureProtocol:
    """Return how the values of `add_measuring_options` have times taken."""
    return MeasureProtocol(
        init=args.init_type,
        rotating_mb=args.rotating_tensor,
        iters=args.iters,
        warmup=args.warmup,
        err_ratio=args.err_ratio,
        sustained=args.power == POWERS[1],
    )
