"""The command line of `tritongemm report`: results as one page to look at."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tritongemm.cli import arguments, options, result_files, shell
from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.formats import Defaults, read_text
from tritongemm.report.page import older, time_to_quality, writing
from tritongemm.report.page.report_data import ReportData
from tritongemm.results import history
from tritongemm.results.server_comparison import read_comparison
from tritongemm.system import files

_ADVICE = "choose another file with -o"


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    p = parser()
    args = p.parse_args(argv)
    if not args.results and args.shipped is None:
        p.error("name RESULTS, or --shipped")
    output, paths = Path(args.output), [Path(path) for path in args.results]
    _check_place(output)
    found = result_files.ReadFiles()
    defaults = Defaults(family=args.family)
    for path in paths:
        result_files.read(path, defaults, found)
    sources = args.results if args.shipped is None else [*args.results, f"shipped tables {args.shipped}".rstrip()]
    if args.shipped is not None:
        result_files.read_shipped(args.shipped, found)
    if not found.records:
        left = "".join(f" ({note.rstrip('.')})" for note in found.notes[:1])
        raise InputError(f"{', '.join(sources)}: no result with a time{left}; name results of tritongemm tune")
    data = result_files.gathered(found, sources, result_files.calls_of(args.workload, defaults, found))
    if args.server:
        data = replace(data, server=read_comparison(Path(args.server), read_text(Path(args.server))))
    if args.against:
        before = result_files.ReadFiles()
        for name in args.against:
            result_files.read(Path(name), defaults, before)
        found.damaged |= before.damaged
        data = replace(data, older=tuple(before.records.values()), notes=(*data.notes, *before.notes))
        shell.answer(f"against {', '.join(args.against)}: {older.describe(older.changes(data, data.older or ()))}")
    text = _write(output, data, args.title)
    shell.report_alike(data.notes, args.verbose)
    for name, curve in time_to_quality.curves_of(data).items():
        shell.answer(f"{name}: {curve.describe()}")
    shell.answer(f"{output}: {len(data.records)} results, {len(text.encode()) / 2**20:.1f} MiB")
    return shell.WRONG if found.damaged else shell.DONE


def draw_page(output: Path, records: Iterable[Record], journal_file: Path) -> None:
    """Draw the page of some results."""
    _check_place(output)
    found = result_files.ReadFiles()
    found.add(records)
    if journal_file.is_file():
        found.histories[journal_file.name] = history.read(journal_file, {problem for problem, _ in found.records})
    _write(output, result_files.gathered(found, [journal_file.name.removesuffix(".journal")], {}), "")


def _check_place(output: Path) -> None:
    files.check_place(output, writing.is_page, "a report of tritongemm", _ADVICE)


def _write(output: Path, data: ReportData, title: str) -> str:
    """Write a page and return its text."""
    text = writing.compose(data, title or f"GEMMs of {', '.join(d.label for d in data.devices)}")
    files.atomic_write(output, text, f"make room and run the same command again, or {_ADVICE}")
    return text


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm report")
    p.add_argument("results", nargs="*", type=arguments.path, metavar="RESULTS",
                   help="results (journals beside them are read too), journals, libraries, campaigns")  # fmt: skip
    arguments.add_shipped(p)
    p.add_argument("-o", "--output", type=arguments.output, required=True, metavar="HTML",
                   help="the page; a report at this path is replaced")  # fmt: skip
    p.add_argument("--workload", type=arguments.path, metavar="FILE",
                   help="sizes with call counts, weights of the uplift (default: a campaign's, or 1 each)")  # fmt: skip
    p.add_argument("--against", nargs="+", type=arguments.path, metavar="RESULTS",
                   help="older results: what became faster, slower, new or gone, and the sum of all calls")  # fmt: skip
    p.add_argument("--server", type=arguments.path, metavar="FILE",
                   help="what tritongemm compare-server -o wrote: the gain in the server")  # fmt: skip
    p.add_argument("--title", default="", metavar="TEXT", help="heading of the page (default: the devices)")
    options.add_family(p)
    arguments.add_verbose(p)
    return p
