"""The command line of `tritongemm gradlib`: the flags of gradlib's tuner and AITER's, for what `tune` does.

Their options mean other things in `tune` (``-k``, ``-o2``, ``--batch``), so this command has
a parser of its own, which fills the same request.
"""

import argparse
import csv
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tritongemm.cli import arguments, model_options, options, shell, tune, tuned_comparison
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import DEFAULT_FAMILY
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.formats import format_of, read_exactly, read_text
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import TunerFormat
from tritongemm.report.console import Reporter
from tritongemm.results.tuned_file import TunedFile
from tritongemm.system import files
from tritongemm.tune.request import Devices, Outputs, SearchScope, SizeSource, TuneRequest
from tritongemm.workloads import sizes

_DTYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_COLUMN_DTYPES = {"f32": "torch.float32", "f16": "torch.float16", "bf16": "torch.bfloat16"}
_BF16 = "bf16"
_FORMAT = "aiter"  # a plug-in of formats/
_AITERS_NAMES = {"dense": _BF16, "dense_bpreshuffle": _BF16, "a4w4_bpreshuffle": "a4w4_blockscale"}  # of our families
_TUNED = f"{_BF16}_tuned_gemm.csv"
_LEAST_PERCENT = 3.0  # by which a new row must be faster, as in AITER's tuners
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = parser().parse_args(argv)
    if args.untune_file is None and args.model_dir is None and args.family is not None:
        args.untune_file = _file_name(args.family, "untuned")
    if args.run_config is not None:
        return _run_config(args)
    for option, needed in (
        ("update_improved", args.update_improved),
        ("min_improvement_pct", args.min_improvement_pct),
    ):
        if needed and not args.compare:
            raise InputError(f"--{option} needs --compare, which times the rows that are there and the new ones")
    output = Path(args.tune_file or _tuned_name(args.untune_file, args.family))
    if args.tune_file is not None and args.family is None and TunedFile.find(output) is None:
        args.family = _family_of(args.untune_file)
    # A file of any name is AITER's where the family is known.
    to = _FORMAT if args.family is not None and args.tune_file is not None else ""
    tuned_file = TunedFile.find(output, to)
    if tuned_file is None:
        raise InputError(
            f"-o {output} is not called as a file of AITER's: name its family, as in --family bf16, or call it as "
            f"AITER does, such as {_TUNED}; results of our own in YAML are written by tritongemm tune"
        )
    target = _candidate_of(output, args) if args.compare else output
    request = _read_request(args, target, to)
    with _report(args, request) as reporter:
        status = tune.run(request, reporter, ["gradlib", *argv])
        if args.compare:
            least = _LEAST_PERCENT if args.min_improvement_pct is None else args.min_improvement_pct
            tuned_comparison.compare(request, reporter, output, target, least, args.update_improved)
    if args.sort and (args.update_improved or not args.compare):
        tuned_file.arrange()
    return status


def _run_config(args: argparse.Namespace) -> int:
    """Time the rows of a file of tuned configs, or PyTorch's choice at sizes."""
    tuned = args.run_config is not True
    source = args.run_config if tuned else args.untune_file
    if source is None:
        raise InputError("--run_config times the rows of the file behind it, or the sizes of -i; name either")
    _require_gpu("--run_config")
    request = _measuring_request(args)
    with _report(args, request) as reporter:
        return shell.DONE if tuned_comparison.run_config(request, reporter, Path(source), tuned) else shell.WRONG


def _require_gpu(option: str) -> None:
    if not machine.count_devices():
        raise InputError(f"{option} times rows on a GPU, and there is none; leave it out to predict")


def _report(args: argparse.Namespace, request: TuneRequest) -> Reporter:
    return Reporter(args.verbose, seconds=request.search.seconds)


def _candidate_of(output: Path, args: argparse.Namespace) -> Path:
    """Return the file of a run whose rows are compared before they go into the output, which it copies."""
    _require_gpu("--compare")
    if args.untune_file is not None:
        with warnings.catch_warnings():  # the run reads the sizes again, and warns then
            warnings.simplefilter("ignore")
            found = sizes.from_results(Path(args.untune_file), Defaults(family=args.family or DEFAULT_FAMILY))
        if any(row.subject for row in found.rows):
            raise InputError("--compare is of single products, and rows of layers are of two; leave it out")
    candidate = output.with_name(f"{output.stem}_candidate{output.suffix}")
    files.check_place(candidate, _names_sizes, "a file of tuned configs", "move it")
    if text := read_exactly(output):
        files.atomic_write(candidate, text)
    else:
        candidate.unlink(missing_ok=True)
    return candidate


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm gradlib", usage="%(prog)s -i CSV -o CSV [OPTION ...]")
    _add_files(p)
    _add_sizes(p)
    _add_search(p)
    _add_measuring(p)
    return p


def _add_files(p: argparse.ArgumentParser) -> None:
    """Add the options that name files, and what of them is kept."""
    g = p.add_argument_group("files")
    g.add_argument("-i", "--untune_file", "--input_file", dest="untune_file", type=arguments.path, metavar="CSV",
        help="sizes to tune, or results to tune again with --all")  # fmt: skip
    g.add_argument("-o", "--output", "--tune_file", "--tuned_file", dest="tune_file", metavar="CSV",
        type=arguments.output_file,
        help="tuned configs, beside the rows that are there; our own results go to a YAML file beside it "
        f"(default: the input's name with tuned for untuned, or {_TUNED})")  # fmt: skip
    g.add_argument("-o2", "--profile_file", type=arguments.path, metavar="CSV",
        help="a CSV of every candidate, as of tune")  # fmt: skip
    g.add_argument("--all", action="store_true", help="tune sizes again that the output already has")
    g.add_argument("--sort", type=_flag, nargs="?", const=True, metavar="BOOL",
        help="sort the entire output by device, N, M and K (default: an output that is sorted stays so, in others "
        "new rows are the last)")  # fmt: skip
    g.add_argument("--batch", type=arguments.size, default=100, metavar="N",
        help="accepted and ignored: every result is stored at once (%(default)s)")  # fmt: skip


def _add_sizes(p: argparse.ArgumentParser) -> None:
    """Add the options that describe sizes."""
    g = p.add_argument_group("sizes")
    g.add_argument("--family", type=options.family, metavar="NAME",
        help="AITER's family, such as a4w4_blockscale, whose files -i and -o are by default; or what a file of M, N "
        "and K alone is of, as of tune")  # fmt: skip
    g.add_argument("--indtype", choices=_DTYPES, help="type of A and B for all sizes (default: the file's)")
    g.add_argument("--outdtype", choices=_DTYPES, help="type of C for all sizes (default: that of --indtype)")
    model_options.add_model_options(g)
    g.add_argument("--batch_size", type=arguments.size, metavar="N", help="multiply each of --nsets by N (default 1)")


def _add_search(p: argparse.ArgumentParser) -> None:
    """Add the options of the search and its devices."""
    g = p.add_argument_group("search")
    g.add_argument("--libtype", metavar="B,…",
        help="backends that race, as of tune; all (the default) means those that compile quickly")  # fmt: skip
    g.add_argument("-k", "--splitK", action="store_true",
        help="try split-K; without --family, and for bf16, it is always tried")  # fmt: skip
    g.add_argument("--budget", type=arguments.budget, metavar="N",
        help="most configs tried for each size, or seconds of the run, as of tune")  # fmt: skip
    g.add_argument("--mp", type=arguments.integer(1, 1024), metavar="N", help="GPUs to use (default: all)")
    g.add_argument("--target", type=options.architecture, metavar="ARCH",
        help="another architecture, as of tune: nothing is timed, and the CSV stays")  # fmt: skip


def _add_measuring(p: argparse.ArgumentParser) -> None:
    """Add the options of timing and checking candidates."""
    g = p.add_argument_group("measuring")
    g.add_argument("--errRatio", type=arguments.number(0, 1, below=True), default=0.05, metavar="R",
        help="share of C's elements that may be outside the tolerance (default %(default)s)")  # fmt: skip
    g.add_argument("--warmup", type=arguments.integer(0, 1_000_000), default=5, metavar="N",
        help="untimed launches (%(default)s)")  # fmt: skip
    g.add_argument("--iters", type=arguments.integer(1, 1_000_000), default=101, metavar="N",
        help="timed launches (%(default)s)")  # fmt: skip
    g.add_argument("--timeout", type=arguments.seconds, default=TuneRequest.timeout_s, metavar="S",
        help="time limit of a compile or a candidate in seconds, as of tune")  # fmt: skip
    g.add_argument("--run_config", type=arguments.path, nargs="?", const=True, metavar="CSV",
        help="tune nothing: time what the rows of CSV name beside PyTorch; without CSV what PyTorch runs at the sizes "
        "of -i")  # fmt: skip
    g.add_argument("--compare", action="store_true",
        help="time the new rows and those that the output has, and leave it as it is: new rows are in a file of "
        "candidates beside it")  # fmt: skip
    g.add_argument("--update_improved", action="store_true",
        help="with --compare, put new rows into the output that are better, or the only ones that run")  # fmt: skip
    g.add_argument("--min_improvement_pct", type=arguments.number(0, 100), metavar="P",
        help=f"with --compare, by how many percent a new row must be faster (default {_LEAST_PERCENT:g})")  # fmt: skip
    g.add_argument("--shape_grouped", action="store_true",
        help="accepted: the race that decides for a size is always on one GPU")  # fmt: skip
    g.add_argument("-v", "--verbose", action="store_true", help="print the outcome of each candidate")


def _flag(text: str) -> bool:
    """Return whether a word says yes."""
    if text.lower() not in _FLAGS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return _FLAGS[text.lower()]


def _tuned_name(source: str | None, family: str | None) -> str:
    """Return the path of results without a named file: in the current folder, as the sizes' file may be a package's."""
    name = Path(source or "").name
    return name.replace("untuned", "tuned") if "untuned" in name else _file_name(family or _BF16, "tuned")


def _family_of(source: str | None) -> str | None:
    """Return the family of a file that has AITER's name for untuned sizes; None for other names."""
    known = (family for format_ in registry.every(TunerFormat) for family in format_.families)
    return next((family for family in known if _file_name(family, "untuned") == Path(source or "").name), None)


def _file_name(family: str, word: str) -> str:
    """Return AITER's name of a family's file of tuned or untuned sizes."""
    name = _AITERS_NAMES.get(family, family)
    if "moe" in name:
        return f"{word}_{name}.csv"
    batched = "_batched" if name.startswith("batched_") else ""
    return f"{name.removeprefix('batched_')}_{word}{batched}_gemm.csv"


def _read_request(args: argparse.Namespace, output: Path, to: str) -> TuneRequest:
    """Return the request of a run."""
    if (args.untune_file is None) == (args.model_dir is None):
        raise InputError("name either a file of sizes with -i, or a model with --model_dir")
    of_model = [name for name in ("tp", "nsets", "batch_size") if getattr(args, name) is not None]
    if of_model and args.model_dir is None:
        raise InputError(f"--{of_model[0]} needs --model_dir; -i names a file of sizes instead")
    request, model = _measuring_request(args), model_options.read_model(args, args.batch_size or 1)
    defaults = request.sizes.defaults
    if model is not None:
        of_a, of_c = _DTYPES.get(args.indtype, ""), _DTYPES.get(args.outdtype or args.indtype, "")
        defaults = replace(defaults, a=defaults.a._replace(dtype=of_a), c=defaults.c._replace(dtype=of_c))
    source = _sizes_file(args, output) if model is None else None
    # The tuners of AITER's other families try splits only when asked to.
    unsplit = not args.splitK and args.family and _AITERS_NAMES.get(args.family, args.family) != _BF16
    return replace(
        request,
        sizes=SizeSource(path=source, model=model, defaults=defaults),
        search=SearchScope(
            budget=args.budget, max_split=1 if unsplit else 0, libtype=None if args.libtype == "all" else args.libtype
        ),
        outputs=Outputs(output, to, None if args.profile_file is None else Path(args.profile_file), not args.all),
    )


def _measuring_request(args: argparse.Namespace) -> TuneRequest:
    """Return a request with how times are taken, on which devices, and the family of a file."""
    return TuneRequest(
        sizes=SizeSource(defaults=Defaults(family=args.family or DEFAULT_FAMILY)),
        devices=Devices(args.target, ngpus=args.mp or machine.count_devices()),
        protocol=MeasureProtocol(iters=args.iters, warmup=args.warmup, err_ratio=args.errRatio),
        timeout_s=args.timeout,
    )


def _sizes_file(args: argparse.Namespace, output: Path) -> Path:
    """Return the file of sizes; where types or biases differ from the user's file, a copy beside the output."""
    source = Path(args.untune_file)
    if not (args.indtype or args.outdtype or args.all_bias):
        return source
    text = read_text(source)
    format_ = format_of(source, text)
    lines = list(_retyped(text, source, args))
    defaults = Defaults(family=args.family or DEFAULT_FAMILY)
    with warnings.catch_warnings():  # the run reads the sizes again, and warns then
        warnings.simplefilter("ignore")
        format_.read_usable(source, _csv_text(lines), defaults).require_undamaged()
    changed = output.with_name(f"{output.stem}_sizes.csv")
    files.check_place(changed, _names_sizes, "a file of sizes", "move it")
    files.atomic_write(changed, _csv_text(_sizes(lines, args.all_bias)))
    return changed


def _csv_text(lines: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def _names_sizes(start: bytes) -> bool:
    """Return whether a file begins with columns of sizes, in any order."""
    columns = start.partition(b"\n")[0].split(b",")
    return {b"M", b"N", b"K"} <= {name.strip() for name in columns}


def _retyped(text: str, source: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the cells of each line of a file of sizes, with other types; none of a blank line, to keep line numbers."""
    columns, types = list[str](), dict[str, str]()
    for cells in _cells(text, source):
        if not columns and cells:
            columns, types = cells, _types(cells, source, args)
        elif cells:
            cells = list((dict(zip(columns, cells, strict=True)) | types).values())
        yield cells


def _types(columns: Sequence[str], source: Path, args: argparse.Namespace) -> dict[str, str]:
    """Return the new types of each row, by column."""
    wanted = {"dtype": args.indtype, "outdtype": args.outdtype or args.indtype}
    types = {name: _COLUMN_DTYPES.get(value, value) for name, value in wanted.items() if value}
    missing = [name for name in (*types, *(["bias"] if args.all_bias else [])) if name not in columns]
    if missing:
        raise InputError(
            f"{source} has no column {', '.join(missing)} that --indtype, --outdtype or --all_bias could change"
        )
    return types


def _sizes(lines: Iterable[Sequence[str]], all_bias: bool) -> list[tuple[str, ...]]:
    """Return the lines without blank ones, each once, with and without a bias where both are wanted."""
    columns, *rows = filter(None, lines)
    biases = ({"bias": "False"}, {"bias": "True"}) if all_bias else ({},)
    biased = (tuple((dict(zip(columns, row, strict=True)) | bias).values()) for row in rows for bias in biases)
    return [tuple(columns), *dict.fromkeys(biased)]


def _cells(text: str, source: Path) -> Iterator[list[str]]:
    """Yield the cells of each line without blanks around them, as many as the first has; none of a blank line."""
    lines, columns = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True), list[str]()
    try:
        for line in lines:
            cells = [cell.strip() for cell in line]
            if not any(cells):
                yield []
                continue
            columns = columns or cells
            if len({*columns}) != len(columns):
                raise InputError(f"{source}: line {lines.line_num} does not name the columns of a CSV, each once")
            if len(cells) != len(columns):
                raise InputError(
                    f"{source}: line {lines.line_num} has {len(cells)} values for {len(columns)} columns; "
                    "write one for each"
                )
            yield cells
    except csv.Error as error:
        raise InputError(
            f"{source}: line {lines.line_num} is no CSV: {error}; end a cell in quotation marks with one"
        ) from None
