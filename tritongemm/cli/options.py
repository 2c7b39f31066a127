"""The command line of `python -m tritongemm.tune`, and the options other commands share with it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from tritongemm.formats import Defaults
from tritongemm.numerics.random_inputs import INITS
from tritongemm.plugins import _modules as registry
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Family, Timer
from tritongemm.search_spaces import loader as target_files
from tritongemm.tuning.roster import describe_backends

EXAMPLES = """\
examples:
  python -m tritongemm.tune -m 16 -n 16 -k 16
  python -m tritongemm.tune --gemm_size_file sizes.yaml --compare -o tuned.yaml
  python -m tritongemm.tune --gemm_size_file tuned.yaml --compare_wo_tuning

Options may be written with _ or -. Without a GPU, or with --target naming another one, kernels are compiled for
real, ranked by an analytical model and checked by Triton's interpreter; such results say "timer: model".
"""


def problem_options(g: argparse._ArgumentGroup) -> None:
    """Add the options that describe one GEMM."""
    g.add_argument("-m", type=int, metavar="M", help="rows of A and C")
    g.add_argument("-n", type=int, metavar="N", help="columns of B and C")
    g.add_argument("-k", type=int, metavar="K", help="columns of A, rows of B")
    g.add_argument("-col_a", "--col-a", action="store_true", help="A is column-major")
    g.add_argument("-col_b", "--col-b", action="store_true", help="B is column-major, as a linear layer's weight is")
    for operand in "abc":
        flag = f"dtype_{operand}"
        text = f"dtype of {operand.upper()}: fp16, bf16, fp32 (tf32), fp8 or bf8 (as the target encodes them), int8"
        g.add_argument(f"-{flag}", f"--{flag.replace('_', '-')}", default=None, metavar="DTYPE", help=text)
    g.add_argument("--bias-vector", nargs="?", const="m", choices=("m", "n"), default=None,
                   help="add a bias: m, one value per row of C (the default form), or n, one per column")  # fmt: skip
    g.add_argument("--family", default="dense", choices=[*plugins.names(Family), *(n for f in plugins.every(Family) for n in f.variants)],
                   help="dense (default); a8w8: fp8 or int8 with a scale per row of A and per column of B; a4w4_blockscale: fp4 "
                   "with a scale for each 32 numbers along K; …_bpreshuffle: B in the order of AITER's assembly kernels")  # fmt: skip


def _budget(text: str) -> tuple[int, float]:
    """Configs, or seconds where it ends in ``s``; 0 for the one not given."""
    whole = text.removesuffix("s")
    try:
        return (int(text), 0.0) if whole == text else (0, float(whole))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of configs nor, as 90s, of seconds") from None


def defaults(args: argparse.Namespace, fp8_encoding: str) -> Defaults:
    """What `problem_options` were given, as the defaults of a file's rows."""
    return Defaults(
        dtype_a=args.dtype_a,
        dtype_b=args.dtype_b,
        dtype_c=args.dtype_c,
        row_major_a=not args.col_a,
        row_major_b=not args.col_b,
        bias=args.bias_vector or "none",
        family=args.family,
        fp8_encoding=fp8_encoding,
    )


def parser() -> argparse.ArgumentParser:
    """All options, grouped."""
    p = argparse.ArgumentParser(
        prog="python -m tritongemm.tune",
        description="Tune GEMMs: C[M, N] = A[M, K] @ B[K, N]. Results are written as they come; the same command resumes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    g = p.add_argument_group("what to tune")
    problem_options(g)
    g.add_argument("--gemm-size-file", metavar="FILE", help="sizes, or stored results, as YAML: a list of {M, N, K, …}")

    g = p.add_argument_group("what to do (default: tune)")
    e = g.add_mutually_exclusive_group()
    e.add_argument("--compare", action="store_true", help="tune, and print the library's time beside ours")
    e.add_argument("--compare-wo-tuning", action="store_true",
                   help="only check the results stored in --gemm_size_file; exit status 1 if one is wrong")  # fmt: skip
    e.add_argument("--benchmark", action="store_true", help="only time the results stored in --gemm_size_file")
    e.add_argument("--generate-only", action="store_true", help="stop after writing the modules")
    e.add_argument("--compile-only", action="store_true", help="stop after compiling; binaries stay in the cache")

    g = p.add_argument_group("where")
    g.add_argument(
        "--target",
        metavar="ARCH",
        help=f"{', '.join(target_files.target_names())}; default: this machine's GPU, or gfx942",
    )
    g.add_argument("--gpu-ids", metavar="I,J,…", help="devices to use")
    g.add_argument("--ngpus", type=int, default=0, metavar="N", help="use the first N devices (default 1)")
    g.add_argument("--num-threads", type=int, default=0, metavar="N", help="compiler processes (default: all cores)")

    g = p.add_argument_group("search")
    g.add_argument("--strategy", default=None, choices=registry.names("strategies"),
                   help="default: guided on a GPU; exhaustive where compiling is all there is to do")  # fmt: skip
    g.add_argument("--budget", type=_budget, default=(0, 0.0), metavar="N|Ss",
                   help="most configs tried for one size (default: the strategy's own; exhaustive tries all kept); or, as 90s, "
                   "seconds of the run after which nothing new is tried and what there is is raced")  # fmt: skip
    g.add_argument("--finalists", type=int, default=12, metavar="N", help="candidates verified and raced (default 12)")
    g.add_argument("--libtype", default=None, metavar="B,…",
                   help=f"who races with PyTorch: all, or a comma list of names (default: all whose kernels compile quickly). "
                   f"{describe_backends()}")  # fmt: skip
    g.add_argument("--algorithms", type=int, default=48, metavar="N",
                   help="screen so many algorithms of hipBLASLt or cuBLASLt for each size, its best guesses first; 0 for all of "
                   "the hundreds there are (default 48)")  # fmt: skip
    g.add_argument("--min-gain", type=float, default=0.5, metavar="PERCENT",
                   help="keep the library unless a candidate is this much faster (default 0.5)")  # fmt: skip

    g = p.add_argument_group("measuring")
    g.add_argument("--profiler", default=None, choices=("auto", *plugins.names(Timer)),
                   help="the clock: events (around graphs of launches; the default), cupti or rocprofiler (the GPU's own, in "
                        "process; auto takes the one that is here), or rocprofv3 (the external tool, for the final race)")  # fmt: skip
    g.add_argument(
        "--iters", type=int, default=200, metavar="N", help="timed launches of a finalist at least (default 200)"
    )
    g.add_argument("--warmup", type=int, default=5, metavar="N", help="launches before them (default 5)")
    g.add_argument("--no-warmup", dest="warmup", action="store_const", const=0, help="the same as --warmup 0")
    g.add_argument("--init-type", default="randn", choices=INITS, help="contents of the operands (default randn)")
    g.add_argument("--rotating-tensor", type=int, default=-1, metavar="MB",
                   help="rotate the operands through this much memory (default: three times the last-level cache)")  # fmt: skip
    g.add_argument("--errRatio", "--err-ratio", dest="err_ratio", type=float, default=0.0, metavar="R",
                   help="share of C's elements that may be outside the tolerance on the GPU (default 0, every one counts); none "
                   "may be lost: NaN, or off by half of |reference| + rms")  # fmt: skip
    g.add_argument("--timeout", type=float, default=60.0, metavar="S",
                   help="seconds one compile or one candidate on the GPU may take (default 60)")  # fmt: skip

    g = p.add_argument_group("results")
    g.add_argument("-o", "--o", "--tuning-results-file", dest="output", metavar="FILE",
                   help="results (default output/tuning_results_<target>.yaml)")  # fmt: skip
    g.add_argument("--profile-file", metavar="FILE",
                   help="CSV with every candidate of every backend: kernel, status, reason, times, error")  # fmt: skip
    g.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True,
                   help="continue from what is there (default), or measure these sizes anew")  # fmt: skip
    g.add_argument("--keep", action="store_true", help="keep the generated modules with all candidates")
    g.add_argument("--verbose", action="store_true", help="what each rule removed, what became of each candidate")
    return p


def normalised(argv: Sequence[str]) -> list[str]:
    """Long options with ``_`` written with ``-``; ``-dtype-a`` and ``-col-a`` as tune_gemm has them, with ``_``."""
    long = [re.sub(r"^--[^=]+", lambda m: m[0].replace("_", "-"), a) for a in argv]
    return [re.sub(r"^-(dtype|col)-(?=[abc](=|$))", r"-\1_", a) for a in long]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parsed options, checked as far as argparse can."""
    p = parser()
    args = p.parse_args(normalised(argv))
    if args.gemm_size_file is None and None in (args.m, args.n, args.k):
        p.error("name a size with -m, -n and -k, or a file of sizes with --gemm_size_file")
    if args.gemm_size_file is not None and (args.m, args.n, args.k) != (None, None, None):
        p.error("-m, -n, -k and --gemm_size_file exclude each other")
    if (args.compare_wo_tuning or args.benchmark) and args.gemm_size_file is None:
        p.error("--compare_wo_tuning and --benchmark read stored results: name their file with --gemm_size_file")
    if args.gpu_ids is not None and args.ngpus:
        p.error("--gpu_ids and --ngpus exclude each other")
    for name in ("iters", "finalists"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1")
    if not all(b >= 0 for b in args.budget):
        p.error("--budget must not be negative")
    for name in ("warmup", "num_threads", "ngpus", "algorithms"):
        if getattr(args, name) < 0:
            p.error(f"--{name} must not be negative")
    if not args.timeout > 0:
        p.error("--timeout must be positive")
    if not args.min_gain >= 0:
        p.error("--min_gain is a percentage, not negative")
    if not 0 <= args.err_ratio < 1:
        p.error("--errRatio is a share of the elements: at least 0, less than 1")
    if args.profile_file is not None and (args.compare_wo_tuning or args.benchmark):
        p.error("--profile_file is written by tuning; --compare_wo_tuning and --benchmark try no candidates")
    return args
