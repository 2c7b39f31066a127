"""The command line of `tritongemm export`: tuned winners as code objects with a manifest."""

from collections.abc import Sequence
from pathlib import Path

from tritongemm.cli import arguments, options, shell, tuned_rows
from tritongemm.core.errors import OutputError
from tritongemm.export.kernel_manifest import export
from tritongemm.formats import Defaults
from tritongemm.workloads import sizes


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = parser().parse_args(argv)
    found = sizes.from_results(Path(args.results), Defaults())
    records = [r.record for r in found.rows if r.record is not None]
    if not found.rows:
        found.require_undamaged()
    try:
        held = {id(row.record): row for row in found.rows}
        here = tuned_rows.find_machine(args.target, (record.target for record in records))
        paths, refused = export(records, Path(args.output), here)
    except OSError as error:
        raise OutputError(f"-o {args.output} can't be written: {error.strerror}; choose another folder") from error
    reasons = [damaged.reason for damaged in found.damaged]
    reasons += [f"{held[id(r)].where(args.results)}: {r.problem.key}: {reason}" for r, reason in refused]
    shell.report_alike((f"left out: {reason}" for reason in reasons), args.verbose)
    left_out = {id(record) for record, _ in refused}
    written = [record for record in records if id(record) not in left_out]
    predicted = sum(record.predicted for record in written)
    if predicted:
        shell.report(
            f"{predicted} of {len(written)} kernels are fast by prediction alone: no GPU has timed or verified them"
        )
    print("export TRITONGEMM_ASM_MANIFESTS=" + ":".join(str(p.resolve()) for p in paths))
    return shell.WRONG if found.damaged else shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm export")
    p.add_argument("results", type=arguments.path, metavar="FILE", help="results of tritongemm tune")
    p.add_argument("-o", "--output", type=arguments.output_folder, required=True, metavar="DIR",
                   help="folder for kernels.csv and the code objects")  # fmt: skip
    options.add_target(p, default=options.DEFAULT_OF_ROWS)
    arguments.add_verbose(p)
    return p
