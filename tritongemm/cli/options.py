"""The command line of `tritongemm tune`, and the options other commands share with it."""

import argparse
import functools
import re
import reprlib
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tritongemm.cli import arguments, model_options, search_options
from tritongemm.core import dtypes
from tritongemm.core.config import DEFAULT_BACKEND
from tritongemm.core.epilogues import EPILOGUES
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.group_rows import GROUP_FORMS, MOST_GROUPS, SPREADS, Groups
from tritongemm.core.problem import DEFAULT_FAMILY, Operand, Problem
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.target import Target
from tritongemm.formats import Defaults
from tritongemm.numerics.computable_families import defaults_on
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, Plugin, Strategy, Timer, TunerFormat
from tritongemm.results.run_files import check_output_name
from tritongemm.results.tuned_file import TunedFile
from tritongemm.search_spaces import loader as target_files
from tritongemm.tune import servers
from tritongemm.workloads import sizes

_OFFERED_DTYPES = ("fp16", "bf16", "fp32", "int8", "fp8", "bf8")
DEFAULT_OF_ROWS = "this machine's GPU; without one what all rows are of, else gfx942"  # the target of stored results
EXAMPLES = """\
examples:
  tritongemm tune -m 16 -n 16 -k 16
  tritongemm tune --gemm_size_file sizes.yaml --compare -o tuned.yaml
  tritongemm tune --gemm_size_file tuned.yaml --compare_wo_tuning
"""
_NOTE = (
    "Options may be written with _ or -. Without a GPU, or with --target naming another one, kernels are really "
    'compiled, ranked by a cost model and verified by Triton\'s interpreter; such results have "timer: model".'
)


class _Parser(arguments.Parser):
    """A parser whose help ends with the lists of families, backends, strategies and timers."""

    def format_help(self) -> str:
        """Return the help text; only this imports all plug-ins."""
        lists = (
            ("families (--family):", _families()),
            ("backends (--libtype):", _backends()),
            ("strategies (--strategy):", ((one.name, _summary(one)) for one in registry.every(Strategy))),
            ("timers (--profiler):", ((one.name, _summary(one)) for one in registry.every(Timer))),
        )
        width = shutil.get_terminal_size().columns - 2  # as argparse's own
        fill = functools.partial(textwrap.fill, width=width, subsequent_indent=" " * 20, break_on_hyphens=False)
        entries = (
            "\n".join([title, *(fill(f"  {name:<16}  {text}") for name, text in rows), ""]) for title, rows in lists
        )
        self.epilog = "\n".join([*entries, EXAMPLES, textwrap.fill(_NOTE, width)])
        return super().format_help()


def _families() -> Iterator[tuple[str, str]]:
    for family in registry.every(Family):
        yield family.name, family.summary
        for name, given in family.variants.items():
            yield "", f"{name}: the same with B in the order {given.b.order}"


def _backends() -> Iterator[tuple[str, str]]:
    for backend in registry.every(Backend):
        also = f" (also called {', '.join(backend.aliases)})" if backend.aliases else ""
        yield backend.name, f"{backend.summary}{also}"


def _summary(plugin: Plugin) -> str:
    """Return the first line of the plug-in class's docstring, up to a semicolon."""
    first = (type(plugin).__doc__ or "").strip().splitlines()[:1]
    return "".join(first).rstrip(".").partition(";")[0]


def problem_options(g: argparse._ArgumentGroup) -> None:
    """Add the options that describe one GEMM."""
    size, once = arguments.size, arguments.Once
    g.add_argument("-m", "--m", type=size, action=once, metavar="M", help="rows of A and C")
    g.add_argument("-n", "--n", type=size, action=once, metavar="N", help="columns of B and C")
    g.add_argument("-k", "--k", type=size, action=once, metavar="K", help="columns of A and rows of B")
    g.add_argument("--batch", type=arguments.size, default=1, metavar="B",
                   help="independent products in one launch, operands [B, rows, columns] (default 1)")  # fmt: skip
    g.add_argument("--shared", choices=("a", "b"), default="",
                   help="the operand that all products of a batch share (default: none)")  # fmt: skip
    g.add_argument("-col_a", "--col-a", action="store_true", help="A is stored column-major")
    g.add_argument("-col_b", "--col-b", action="store_true",
        help="B is stored column-major, like the weight of a linear layer")  # fmt: skip
    g.add_argument("-dtype_a", "--dtype-a", "--dtype", type=dtype, metavar="DTYPE",
                   help="type of A: fp16, bf16, fp32 (computed as tf32), int8, fp8 or bf8 (the target's encoding) "
                   "(default: the family's, which is fp16 for dense)")  # fmt: skip
    g.add_argument(
        "-dtype_b",
        "--dtype-b",
        type=dtype,
        metavar="DTYPE",
        help="type of B (default: that of the family and its scales, or A's)",
    )
    g.add_argument("-dtype_c", "--dtype-c", type=dtype, metavar="DTYPE",
                   help="type of C (default: the family's or A's; of fp8 fp16, of int8 int32)")  # fmt: skip
    g.add_argument("--bias-vector", nargs="?", const="m", choices=("m", "n"), default=None,
        help="add a bias: m is one value per row of C (the default without a value), n is one per column (default: no "
        "bias)")  # fmt: skip
    g.add_argument("--epilogue", choices=EPILOGUES, default="none", metavar="NAME",
                   help="what is done with a product before it is stored: silu, gelu, gelu_tanh or relu, or of gate "
                   "and up, whose columns alternate by 8 (in groups are apart), silu_mul, gelu_mul or gelu_tanh_mul; "
                   "block, or _block behind one of these: fp8 with a factor for each 128 columns; add: the sum of it "
                   "and a matrix (default: nothing)")  # fmt: skip
    g.add_argument("--family", type=family, default=DEFAULT_FAMILY, metavar="NAME",
        help="types and scales of the GEMM and layout of B: one of the families listed below (default "
        "%(default)s)")  # fmt: skip
    g.add_argument("--scales", choices=tuple(GRANULARITIES), default="", metavar="NAME",
                   help="granularity of the scale factors: per operand (tensor), per row of A and column of B (row), "
                   "per 1 x 128 of A and 128 x 128 of B (block), per 1 x 128 of both (group), per 32 along K (mx); "
                   "_rows: factors stored as [rows, K / 128]; _tma: rows of A padded to 4; weight_128, weight_mx and "
                   "others: of a weight of four bits "
                   "(default: the family's)")  # fmt: skip
    _add_group_options(g)


def _add_group_options(g: argparse._ArgumentGroup) -> None:
    """Add the options of a grouped GEMM, as in a mixture of experts."""
    g.add_argument("--groups", type=arguments.integer(1, MOST_GROUPS), default=1, metavar="G",
        help="grouped GEMM of G groups, each with its own B (mixture of experts); -m is the total rows "
        "(default 1)")  # fmt: skip
    g.add_argument("--group-form", choices=GROUP_FORMS, default=GROUP_FORMS[0],
        help="contiguous: the rows of the groups follow each other; masked: room for --room rows per group (default "
        "%(default)s)")  # fmt: skip
    g.add_argument("--spread", type=arguments.spread, default=SPREADS[0], metavar="HOW",
        help="how rows are spread over groups in tuning: uniform, skewed (few groups have most rows), or "
        "comma-separated captured rows per group, such as 7,0,33 (default %(default)s)")  # fmt: skip
    g.add_argument("--room", type=arguments.size, default=0, metavar="ROWS",
        help="rows that each group has room for in the masked form, which needs it")  # fmt: skip


def _read_groups(args: argparse.Namespace) -> Groups | None:
    """Return the groups that the options describe; None of one product."""
    if args.groups == 1:
        return None
    given = {"spread": args.spread} if isinstance(args.spread, str) else {"spread": "captured", "counts": args.spread}
    return Groups.from_json({"groups": args.groups, "group_form": args.group_form, "room": args.room, **given})


def dtype(text: str) -> str:
    """Return the name of a type of operands."""
    try:
        dtypes.dtype(text)
    except InputError:
        offered = ", ".join(_OFFERED_DTYPES)
        raise argparse.ArgumentTypeError(f"unknown dtype {reprlib.repr(text)}; there are: {offered}") from None
    return text


def architecture(text: str) -> str:
    """Return the architecture of this name, or the GPU's name as it is spelled: sm90 of sm_90, H100 of h100.

    What a driver writes behind an architecture, as in ``gfx942:sramecc+:xnack-``, changes no kernel.
    """
    word = re.sub(r"[-_ ]", "", text.lower().partition(":")[0])
    name = re.sub(r"^(sm[0-9]+)a$", r"\1", word)
    known = name in target_files.target_names()
    return name if known else text.upper() if target_files.target_of_device(text.upper()) else text


def family(text: str) -> str:
    """Return the name of a family or variant, or another tool's family name."""
    try:
        registry.family_of(text)
    except InputError as error:
        if text in registry.names(Family):  # and its file is wrong
            raise argparse.ArgumentTypeError(str(error)) from None
        others = dict.fromkeys(name for format_ in registry.every(TunerFormat) for name in format_.families)
        if text not in others:
            more = ", ".join(name for name in others if name not in str(error))
            raise argparse.ArgumentTypeError(f"{error}; names from other tools' files: {more}") from None
    return text


def defaults(args: argparse.Namespace, target: Target) -> Defaults:
    """Return the values of `problem_options` for a target, as defaults for the rows of a file."""
    return defaults_on(target, given_defaults(args))


def problem(args: argparse.Namespace, target: Target) -> Problem:
    """Return the problem that the values of `problem_options` describe."""
    if None in (args.m, args.n, args.k):
        raise InputError("name a size with -m, -n and -k")
    (row,) = sizes.from_options(args.m, args.n, args.k, defaults(args, target))
    return row.problem


def given_defaults(args: argparse.Namespace) -> Defaults:
    """Return the values of `problem_options`, without what depends on the target."""
    return Defaults(
        Operand(args.dtype_a or "", not args.col_a, shared=args.shared == "a"),
        Operand(args.dtype_b or "", not args.col_b, shared=args.shared == "b"),
        Operand(args.dtype_c or ""),
        bias=args.bias_vector or "none",
        epilogue=args.epilogue,
        family=args.family,
        scales=args.scales,
        batch=args.batch,
        groups=_read_groups(args),
    )


def parser() -> arguments.Parser:
    """Return all options, grouped."""
    p = _Parser("tritongemm tune", usage="%(prog)s [OPTION ...]", formatter_class=argparse.RawDescriptionHelpFormatter)
    p.description = textwrap.fill(p.description or "", 78)
    g = p.add_argument_group("what to tune")
    problem_options(g)
    g.add_argument("--gemm-size-file", type=arguments.path, metavar="FILE",
        help="a file of sizes or of stored results; YAML: a list of {M, N, K, …}")  # fmt: skip
    g.add_argument("--workload", type=arguments.path, metavar="FILE",
        help="a file of sizes with call counts: tune a table over M for each N and K, up to its largest M")  # fmt: skip
    g.add_argument("--m-range", type=arguments.m_range, metavar="LOW-HIGH",
        help="tune a table over these M, such as 1-8192, for -n and -k, or for each N and K in the file "
        "of sizes")  # fmt: skip
    help_text = "with --workload: no tables for layers with one input joined to one GEMM (q_proj, k_proj, v_proj)"
    g.add_argument("--no-join", action="store_true", help=help_text)
    model_options.add_model_options(p.add_argument_group("sizes of a model, instead of the above"))
    _add_actions(p)
    g = p.add_argument_group("where")
    add_target(g)
    arguments.add_devices(g, "--gpu-ids", default="1")
    search_options.add_search_options(p)
    search_options.add_measuring_options(p)
    _add_results(p)
    return p


def _add_actions(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what to do (default: tune)").add_mutually_exclusive_group()
    g.add_argument("--compare", action="store_true", help="tune, and print the library's time beside ours")
    g.add_argument("--compare-wo-tuning", action="store_true",
        help="only verify the results stored in --gemm_size_file; the exit status is 1 if one is wrong")  # fmt: skip
    g.add_argument("--benchmark", action="store_true", help="only time the results stored in --gemm_size_file")
    g.add_argument("--print-sizes", action="store_true", help="only print the sizes, with their weights and callers")
    g.add_argument("--generate-only", action="store_true", help="stop after writing the modules with the kernels")
    g.add_argument("--compile-only", action="store_true", help="stop after compiling; binaries stay in the cache")


def add_target(
    g: argparse._ActionsContainer, *names: str, default: str = "that of this machine's GPU, or gfx942"
) -> None:
    """Add the option that names an architecture."""
    known = ", ".join(target_files.target_names())
    g.add_argument(*names, "--target", dest="target", type=architecture, metavar="ARCH",
                   help=f"architecture, or a GPU that has it (default: {default}): {known}")  # fmt: skip


def add_family(p: argparse.ArgumentParser) -> None:
    """Add the option of the family of rows that name none."""
    p.add_argument("--family", default=DEFAULT_FAMILY, metavar="NAME",
                   help="family of files that name none, such as M, N and K alone (default %(default)s)")  # fmt: skip


def _add_results(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("results")
    g.add_argument("-o", "--o", "--output", "--tuning-results-file", dest="output", type=arguments.output_file,
        metavar="FILE",
        help="write results to this YAML file (default output/tuning_results_<target>.yaml). A name of another tool's "
        "format, such as bf16_tuned_gemm.csv, gets the results that the tool can use; all go to a YAML "
        "file beside it")  # fmt: skip
    g.add_argument("--to", default="", metavar="NAME",
        help="format of -o, such as aiter (default: by its contents or its name)")  # fmt: skip
    g.add_argument("--profile-file", type=arguments.path, metavar="FILE",
        help="write a CSV with every candidate of every backend: kernel, status, reason, times, error")  # fmt: skip
    g.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True,
        help="resume from existing results (default), or measure these sizes again")  # fmt: skip
    g.add_argument("--keep", action="store_true", help="keep the generated modules with the configs that were tried")
    g.add_argument("--verbose", action="store_true",
        help="print what each pruning rule removed and the outcome of each candidate")  # fmt: skip


def _names_file(args: argparse.Namespace) -> bool:
    return args.gemm_size_file is not None or args.workload is not None


# Combinations of options that are refused, each with its message.
_REFUSED: tuple[tuple[Callable[[argparse.Namespace], bool], str], ...] = (
    (lambda a: a.gemm_size_file is not None and a.workload is not None,
     "--gemm_size_file and --workload exclude each other: the first tunes sizes, the second tables over M"),
    (lambda a: _names_file(a) and (a.m, a.n, a.k) != (None, None, None),
     "-m, -n, -k and a file of sizes exclude each other"),
    (lambda a: a.m_range is not None and a.m is not None,
     "-m and --m_range exclude each other"),
    (lambda a: not _names_file(a) and a.model_dir is None and None in (a.m or a.m_range or a.server, a.n, a.k),
     "name a size with -m, -n and -k, a table with --m_range, -n and -k, a file of sizes with --gemm_size_file or "
     "--workload, or a model with --model_dir"),
    (lambda a: (a.compare_wo_tuning or a.benchmark) and (a.workload is not None or a.m_range is not None),
     "--workload and --m_range tune; --compare_wo_tuning and --benchmark read stored results"),
    (lambda a: (a.compare_wo_tuning or a.benchmark) and a.gemm_size_file is None,
     "--compare_wo_tuning and --benchmark read stored results: name their file with --gemm_size_file"),
    (lambda a: a.server is not None and (a.workload is not None or a.m_range is not None),
     "--for races one kernel at each M of the server's table: omit --workload and --m_range"),
    (lambda a: a.server is not None and a.libtype is not None and not servers.may_race(a.libtype, a.server),
     f"--for races one kernel: omit --libtype, or name the server or {DEFAULT_BACKEND}"),
    (lambda a: (a.top_k is None) != (a.server is None or a.groups == 1),
     "--for, --groups and --top_k together race a server's MoE kernel: give all three, or only --for"),
    (lambda a: a.top_k is not None and (_names_file(a) or a.model_dir is not None),
     "an MoE layer is described only by --groups, --top_k, -n (inner size of an expert) and -k (hidden size)"),
    (lambda a: a.unconstrained is not None and a.invariant is None,
     "--unconstrained names the results that an --invariant run is compared with: give both"),
    (lambda a: a.invariant_runs > 1 and a.invariant is None,
     "--invariant-runs chooses the order of an --invariant run: give both"),
    (lambda a: a.invariant is not None and a.server is not None and a.top_k is not None,
     "servers read no table of experts where batches must not matter, but take a default: omit --invariant"),
    (lambda a: a.profile_file is not None and (a.compare_wo_tuning or a.benchmark),
     "--profile_file lists the candidates of a tuning run; --compare_wo_tuning and --benchmark have none"),
)  # fmt: skip


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options, after the checks that do not depend on the machine."""
    p = parser()
    for word in argv:
        # argparse would take it for -o with the file "2…"; in other tuners -o2 names the file of all candidates.
        if word.startswith("-o2"):
            p.error(
                f"{word}: there is no option -o2; name the CSV of all candidates with --profile_file FILE, and the "
                "results with -o FILE, with a blank between"
            )
    args = p.parse_args(argv)
    for refused, complaint in _REFUSED:
        if refused(args):
            p.error(complaint)
    if complaint := model_options.complain_of_model(args) or arguments.complain_of_devices(args):
        p.error(complaint)
    if args.output is not None:
        try:
            if TunedFile.find(Path(args.output), args.to) is None:
                check_output_name(Path(args.output))
        except (InputError, OutputError) as error:
            p.error(str(error))
    return args
