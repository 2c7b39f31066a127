"""The command line of `tritongemm convert`: results of one format written in another, and files merged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritongemm.cli import arguments, options, shell, tuned_rows
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.formats import format_of, plain_text, read_exactly, read_text, results_format
from tritongemm.plugins.contracts import Format, ResultsFormat, WritableFormat
from tritongemm.results import tuned_file
from tritongemm.system import files

_Thing = tuple[Problem, str, int]


@dataclass
class _Found:
    """The contents of the files."""

    # The best result of each problem on each device, by `_rank`.
    records: dict[_Thing, Record] = field(default_factory=dict)
    # Files in the output's own format, whose rows are kept byte for byte.
    merged: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out
    damaged: bool = False  # whether that was because it can't be read


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = parser().parse_args(argv)
    output, paths = Path(args.output), [Path(path) for path in args.files]
    format_ = tuned_file.output_format(output, args.to)
    with tuned_file.held(output):
        files_there = _base(output, format_, paths)
        found = _read(paths, format_, args.family)
        if not (found.records or found.merged):
            raise InputError(
                f"{', '.join(args.files)}: no result that can be written as {format_.title}"
                + "".join(f"; {note}" for note in found.notes[:1])
                + "; files of one format are merged into another of it, which --to names"
            )
        if isinstance(format_, ResultsFormat) and (
            clash := next(tuned_rows.list_conflicts(found.records.values()), "")
        ):
            raise InputError(f"{', '.join(args.files)}: {clash}; keep them in files apart")
        base, notes = _merge(format_, files_there, found.merged, args.family)
        written = tuned_file.write(output, format_, found.records.values(), base, family=args.family)
    said = [f"left out: {note}" for note in found.notes] + [f"merging: {note}" for note in notes]
    said += [f"not written in full: {record.problem.key}: {reason}" for record, reason in written.omitted]
    shell.report_alike(said, args.verbose)
    ranges = sum(record.m_from > 0 for record in found.records.values())
    if ranges and format_ is not results_format():
        shell.report(
            f"not complete: {ranges} results serve ranges of M, which {format_.title} has not: each is of its M alone"
        )
    if not (written.count or found.merged):
        raise InputError(f"{output}: none of {len(found.records)} results could be written as {format_.title}")
    merged = f"{len(found.merged)} files merged; " if found.merged else ""
    shell.answer(f"{output}: {merged}{written.count} of {len(found.records)} results written as {format_.title}")
    return shell.WRONG if found.damaged else shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm convert")
    p.add_argument("files", nargs="+", type=arguments.path, metavar="FILE", help="results, or files to merge")
    p.add_argument("-o", "--output", type=arguments.output, required=True, metavar="OUT",
                   help="output file; its existing rows for other problems are kept")  # fmt: skip
    p.add_argument("--to", default="", metavar="NAME", help="format of OUT (default: by its contents or its name)")
    options.add_family(p)
    arguments.add_verbose(p)
    return p


def _base(output: Path, format_: WritableFormat, paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the output as it stands, where its rows are kept."""
    if output.is_dir():
        return []
    files.check_place(output, lambda start: True, "results", "choose another file with -o")
    text = read_exactly(output)
    if not text.strip():
        return []
    if isinstance(format_, ResultsFormat):
        if not any(files.are_one(output, path) for path in paths):
            raise OutputError(
                f"{output} holds results; name it among the files too, to keep them, or choose another -o"
            )
        return []
    return [(output, text)]


def _read(paths: Sequence[Path], format_: WritableFormat, family: str) -> _Found:
    """Return what the files hold; of results of one thing the fastest, and of equally fast ones the first."""
    found = _Found()
    for path in paths:
        exact = read_exactly(path) or read_text(path)  # which reports what is wrong with a file that is empty
        text = plain_text(exact)
        source = format_of(path, text)
        if source is format_ and format_.merge([(path, exact)], family) is not None:
            found.merged.append((path, exact))
            continue
        _add_results(found, path, text, source, family)
    return found


def _add_results(found: _Found, path: Path, text: str, source: Format, family: str) -> None:
    results = source.read_usable(path, text, Defaults(family=family))
    found.damaged |= bool(results.damaged)
    found.notes += [row.reason for row in results.damaged]
    records = [row.record for row in results.rows if row.record is not None]
    if len(records) < len(results.rows):
        found.notes.append(f"{path}: {results.describe_untuned()}")
    for record in records:
        thing = (record.problem, record.target, record.compute_units)
        known = found.records.setdefault(thing, record)
        found.records[thing] = min(known, record, key=_rank)
        if bool(known.m_from) != bool(record.m_from):
            found.notes.append(
                f"{path}: {record.problem.key} has a result of a range of M and one of its own M alone; a file holds "
                "one of them, and that of the range is kept"
            )


def _rank(record: Record) -> tuple[bool, float]:
    """Return the sort key of results of one problem: those that serve a range of M first, then the faster."""
    return not record.m_from, record.seconds


def _merge(
    format_: WritableFormat, there: Sequence[tuple[Path, str]], sources: Sequence[tuple[Path, str]], family: str
) -> tuple[str | None, tuple[str, ...]]:
    """Return the text that results are written in, and what merging decided; None where the format merges nothing."""
    known = [path for path, _ in there]
    every = [*there, *((path, text) for path, text in sources if not any(files.are_one(path, one) for one in known))]
    if not every or (merged := format_.merge(every, family)) is None:
        return None, ()
    return merged.text, merged.notes
