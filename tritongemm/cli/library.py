"""The command line of `tritongemm library`: it builds, merges, lists and verifies libraries."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tritongemm.cli import arguments, shell, tuned_rows
from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.export.library import storage, writing
from tritongemm.export.library.entry import LibraryEntry
from tritongemm.export.library.storage import open_library
from tritongemm.export.library.writing import Contents, publish
from tritongemm.formats import Defaults
from tritongemm.hip_ext import machine
from tritongemm.system import files
from tritongemm.system.printable import printable
from tritongemm.workloads import sizes

_COLUMNS = ("size", "M", "target", "units", "winner", "us", "library us", "config", "code")
_WORDS = ("size", "target", "winner", "config", "code")


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm library")
    actions = p.add_subparsers(required=True, metavar="{build,merge,list,verify}", parser_class=arguments.Parser)
    build = actions.add_parser("build", help="compile the winners of results files and write them as a library")
    build.add_argument("results", nargs="+", type=arguments.path, metavar="FILE",
                       help="results of tritongemm tune")  # fmt: skip
    merge = actions.add_parser("merge", help="merge libraries; of two results the faster is kept")
    merge.add_argument("libraries", nargs="+", type=arguments.path, metavar="LIBRARY", help="folders or archives")
    for one in (build, merge):
        one.add_argument("-o", "--output", type=_output, required=True, metavar="OUT",
                         help="a folder, or an archive if the name ends in .zip")  # fmt: skip
    several = [actions.add_parser("list", help="print the entries of libraries")]
    several.append(actions.add_parser("verify", help="read every code object and report damaged ones"))
    for one in several:
        one.add_argument("libraries", nargs="+", type=arguments.path, metavar="LIBRARY", help="folders or archives")
    for one in (build, merge, *several):
        arguments.add_verbose(one)
    for one, run in zip((build, merge, *several), (_build, _merge, _list, _verify), strict=True):
        one.set_defaults(run=run)
    return p


def _output(text: str) -> str:
    """Return the name of a library to write; a name that ends as another archive would become a folder."""
    if text.endswith(storage.ARCHIVE_SUFFIX):
        return arguments.output(text)
    try:
        return arguments.output_folder(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or an archive that ends in {storage.ARCHIVE_SUFFIX}") from None


def _build(args: argparse.Namespace) -> int:
    """Write a library of results files, in place of one that is there."""
    output, damaged = Path(args.output), False
    records: list[Record] = []
    for path in args.results:
        found = sizes.from_results(Path(path), Defaults())
        records += [row.record for row in found.rows if row.record is not None]
        damaged |= bool(found.damaged)
        shell.report_alike((f"left out: {row.reason}" for row in found.damaged), args.verbose)
    published = publish(records, output, machine.find_machine(None))
    shell.report_alike(published.describe_missing(), args.verbose)
    if not published.built.entries:
        raise InputError(f"{', '.join(args.results)}: no result can be held in a library; tune sizes on the GPU first")
    for line in tuned_rows.list_calls(records, every=False):
        shell.report(line)
    held = [(one.record.code, one.kernel.sha256) for one in published.built.entries if one.kernel is not None]
    if others := sum(measured not in ("", packed) for measured, packed in held):
        shell.report(
            f"{others} of {len(held)} kernels are not the code that was measured, as they are compiled otherwise here, "
            "and may not be as fast; tritongemm check names them in the file of results, and --repair races them again"
        )
    _report_written(output, published.contents, published.conflicts, args.verbose)
    return shell.WRONG if damaged or published.built.left_out else shell.DONE


def _merge(args: argparse.Namespace) -> int:
    """Add libraries to the output."""
    output = Path(args.output)
    contents, conflicts, damaged = Contents(), list[str](), False
    own: list[LibraryEntry] = []
    with writing.held(output):
        others = [Path(path) for path in args.libraries if not files.are_one(Path(path), output)]
        for path in ([output] if storage.is_library(output) else []) + others:
            library = open_library(path)
            faults = library.faults()
            _report_faults("damaged" if path == output else "left out", path, faults, args.verbose)
            complete = [entry for entry in library.entries if entry.name not in faults]
            helpers = [helper for helper in library.helpers.values() if helper.name not in faults]
            readers = writing.readers(library, faults)
            conflicts += writing.merge(contents, complete, readers)
            writing.add_beside(contents, helpers, library.targets, readers)
            damaged |= bool(faults)
            own += library.all_entries() if path == output else []
        if not contents.entries:
            raise InputError(f"{', '.join(args.libraries)}: there is no usable entry to merge")
        for entry in own:  # damaged entries that nothing has replaced: check --repair finds them there
            contents.entries.setdefault(entry.key, entry)
        writing.write(output, contents)
    _report_written(output, contents, conflicts, args.verbose)
    return shell.WRONG if damaged else shell.DONE


def _report_faults(what: str, path: Path, faults: Mapping[str, str], verbose: bool) -> None:
    lines = (f"{what}: {path}: {name}: {fault.removeprefix(f'{path}: ')}" for name, fault in faults.items())
    shell.report_alike(lines, verbose)


def _report_written(output: Path, contents: Contents, conflicts: Sequence[str], verbose: bool) -> None:
    shell.report_alike((f"conflict: {conflict}" for conflict in conflicts), verbose)
    kernels = sum(entry.kernel is not None for entry in contents.entries.values())
    size = sum({code.sha256: code.size for code in contents.objects}.values())
    beside = f" and {len(contents.helpers)} helper kernels" if contents.helpers else ""
    digest = open_library(output).digest
    shell.answer(
        f"{output}: {len(contents.entries)} results, {kernels} with kernels{beside} of {size / 1e6:.1f} MB, "
        f"{len(conflicts)} conflicts (sha256 {digest[:12]})"
    )


def _list(args: argparse.Namespace) -> int:
    """Print the entries of libraries."""
    damaged = False
    for path in args.libraries:
        library = open_library(Path(path))
        shell.report_alike((f"left out: {path}: {entry}" for entry in library.damaged), args.verbose)
        damaged |= bool(library.damaged)
        beside = f", {len(library.helpers)} helper kernels" if library.helpers else ""
        shell.answer(f"{path}: {len(library.entries)} results{beside} (sha256 {library.digest[:12]})")
        if rows := [_row(entry) for entry in sorted(library.entries, key=_place)]:
            shell.answer_table(_COLUMNS, rows, _WORDS)
    return shell.WRONG if damaged else shell.DONE


def _place(entry: LibraryEntry) -> tuple[str, int, int, int]:
    """Return what entries are listed by: the layers of each target, and each from its smallest M on."""
    problem = entry.record.problem
    return entry.record.target, problem.n, problem.k, problem.m


def _row(entry: LibraryEntry) -> list[str]:
    record, kernel = entry.record, entry.kernel
    m, library = record.problem.m, record.library_seconds
    return [
        printable(record.problem.key),
        f"{record.m_from}-{m}" if 0 < record.m_from < m else str(m),
        printable(record.target or "-"),
        str(record.compute_units),
        printable(record.winner),
        f"{record.seconds * 1e6:.2f}",
        "-" if library is None else f"{library * 1e6:.2f}",
        printable(record.config.short_name),
        kernel.sha256[:12] if kernel else "-",
    ]


def _verify(args: argparse.Namespace) -> int:
    """Read every code object of libraries."""
    damaged = 0
    for path in args.libraries:
        library = open_library(Path(path))
        faults = library.faults()
        _report_faults("damaged", Path(path), faults, args.verbose)
        damaged += len(faults)
        count = len(library.entries) + len(library.helpers) + len(library.damaged)
        what = "results and helper kernels" if library.helpers else "results"
        shell.answer(f"{path}: {count - len(faults)} of {count} {what} are complete (sha256 {library.digest[:12]})")
    return shell.WRONG if damaged else shell.DONE
