"""The command line of `tritongemm lookup`: which row of tuned files serves a call, found without a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tritongemm.cli import arguments, options, shell, tuned_rows
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.export.library import storage
from tritongemm.formats import Defaults
from tritongemm.hip_ext import machine
from tritongemm.operations.served_problems import describe_calls, is_served, other_layouts
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins.validity import check_order
from tritongemm.serving import shipped_tables, source_row, stated_orders
from tritongemm.serving.loaded_tables import merge, read_table
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.source_row import SourceRow, kind_of, same_memory
from tritongemm.workloads import sizes


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 0 where a row serves and 1 where none does, else one of `cli.shell`."""
    p = parser()
    args = p.parse_args(argv)
    if not args.files and args.shipped is None:
        p.error("name files of results, or --shipped")
    shipped = shipped_tables.find(args.shipped) if args.shipped else None
    files = args.files if args.shipped is None else [*args.files, shipped_tables.NAME]
    tables = merge([read_table(Path(file)) for file in files])
    rows = [row for table in tables for row in table.rows]
    records = [*(row.record for row in rows), *(record for table in tables for record in table.unserved)]
    here = tuned_rows.find_machine(args.target, (record.target for record in records))
    target, gbps = here.target, shipped.gpu["memory_gbps"] if shipped else machine.memory_gbps(here)
    device = replace(target, compute_units=args.compute_units or target.compute_units)
    problem = options.problem(args, target)
    table = RecordTable(rows).of_gpu(device.name, device.compute_units, gbps)
    found = _find(table, problem, device)
    lines = _describe(*found, problem, device, table) if not isinstance(found, Support) else [f"fallback: {found}"]
    for line in lines:
        shell.answer(line)
    if isinstance(found, Support):
        others = [*_foreign_rows(args.files, problem, device), *_other_devices(table, problem, device, found)]
        for line in [*others, *_other_memory(rows, problem, gbps)]:
            shell.answer(line)
    return shell.WRONG if isinstance(found, Support) else shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm lookup", usage="%(prog)s [FILE ...] -m M -n N -k K [OPTION ...]")
    p.add_argument("files", nargs="*", type=arguments.path, metavar="FILE", help="results, as in TRITONGEMM_CONFIG")
    arguments.add_shipped(p)
    call = p.add_argument_group("the call; B is column-major, as a linear layer's weight is, without -row_b")
    options.problem_options(call)
    help_text = "B is stored row-major, as in x @ b with b [K, N]"
    call.add_argument("-row_b", "--row-b", dest="col_b", action="store_false", help=help_text)
    p.set_defaults(col_b=True)
    g = p.add_argument_group("the device")
    options.add_target(g, default=options.DEFAULT_OF_ROWS)
    g.add_argument("--compute-units", type=arguments.size, metavar="N",
        help="compute units of the device (default: the target's)")  # fmt: skip
    return p


def _find(found: RecordTable, problem: Problem, device: Target) -> tuple[str, SourceRow] | Support:
    """Return how a call is served and by which row, or why by none."""
    if not is_served(problem):
        return Support(f"{problem.key} is no product that tritongemm.mm or scaled_mm computes")
    row = found.find_row(problem, device.name, device.compute_units)
    if isinstance(row, Support):
        near = _find_near(found, problem, device)
        return ("near", near) if near else row
    launchable = _is_served(row.record)
    return (kind_of(row.record, problem.m), row) if launchable else Support(f"{row.where}: {launchable}")


def _foreign_rows(files: Sequence[str], problem: Problem, device: Target) -> Iterator[str]:
    """Yield the rows of a call in other tools' files that name kernels which nothing here runs."""
    for path in (file for file in files if file != shipped_tables.NAME and not storage.is_library(Path(file))):
        for row in sizes.from_results(Path(path), Defaults()).rows:
            if row.foreign and row.problem == problem and row.target in ("", device.name):
                units = f", on {row.compute_units} compute units" if row.compute_units else ""
                yield f"{row.where(path)} names {row.foreign}, which nothing here runs{units}"


def _other_devices(table: RecordTable, problem: Problem, device: Target, reason: Support) -> Iterator[str]:
    """Yield the devices of a product's rows, where none is of the device; without any, their layouts."""
    known = table.devices_of(problem)
    for other in () if known else other_layouts(problem):
        if table.devices_of(other) and describe_calls(other) not in reason.reason:
            yield f"rows of this N x K are of layout {other.layout}, which serves {describe_calls(other)}"
    if any(isinstance(table.find_row(problem, *one), SourceRow) for one in known):
        return  # the reason names these devices
    if known and not {(device.name, units) for units in (0, device.compute_units)} & {*known}:
        named = (f"{name or 'no target named'}, {units or 'any number of'} compute units" for name, units in known)
        yield f"all rows of this N x K are of {'; '.join(named)}"


def _other_memory(rows: Sequence[SourceRow], problem: Problem, memory_gbps: int) -> Iterator[str]:
    """Yield a line on the shipped rows of a product, if all of them are for GPUs of other memory."""
    shipped = {row.shipped_for for row in rows if row.shipped_for and row.record.problem.at(1) == problem.at(1)}
    if shipped and not any(same_memory(gbps, memory_gbps) for gbps in shipped):
        others = map(str, sorted(shipped))
        names = ", ".join(tables.name for tables in shipped_tables.read())
        text = f"shipped rows of this N x K are for memory of {' and '.join(others)} GB/s, not {memory_gbps}"
        yield f"{text}; --shipped GPU looks in those of one GPU: {names}"


def _find_near(rows: RecordTable, problem: Problem, device: Target) -> SourceRow | None:
    """Return the row of another M that serves a call, if any may and there is one."""
    if not serves_other_m(problem, device.name):
        return None
    serves = _is_served if problem.kind == "grouped" else source_row.is_launchable
    return next((r for r in rows.near_rows(problem, device.name, device.compute_units) if serves(r.record)), None)


def _is_served(record: Record) -> Support:
    """Return whether a record's kernel can be launched, or the library that won it called."""
    won = source_row.baseline_won(record) and not record.predicted
    return SUPPORTED if won else source_row.is_launchable(record)


def _describe(kind: str, row: SourceRow, problem: Problem, device: Target, table: RecordTable) -> Iterator[str]:
    record = row.record
    spans = {
        "range": f", M {record.m_from} to {record.problem.m}",
        "bucket": f", padded M {record.problem.m}",
        "near": _near(record.problem.m, problem.m),
    }
    yield f"{kind}: {problem.key} on {device.name}, {device.compute_units} compute units{spans.get(kind, '')}"
    yield f"row       {row.where}"
    yield f"config    {record.config.name}"
    yield f"winner    {record.winner}"
    share = f", {record.speedup:.3f}x {record.library}" if record.speedup else ""
    yield f"time      {record.seconds * 1e6:.2f} us at M {record.problem.m}{share}"
    if record.order:
        known = stated_orders.order_of(table.near_rows(problem, device.name, device.compute_units))
        fault = known if isinstance(known, Support) else check_order(record, device)
        why = "that of all M of the product" if fault else f"but does not serve where rows must be invariant: {fault}"
        yield f"order     {record.order}, {why}"
    if record.library_fault:
        yield f"wrong     the library at {record.library_fault}"
    if record.seconds_with_quantization is not None:
        quantised = f"{record.seconds_with_quantization * 1e6:.2f} us with A quantised before it"
        yield f"quantise  {(record.quantize_seconds or 0.0) * 1e6:.2f} us, {quantised}"
    if record.held_out:
        yield f"held out  {_held_out(record)}"


def _near(found: int, asked: int) -> str:
    """Return which other row serves; of groups it may be one of the same M with another spread."""
    if found == asked:
        return ", by a row whose groups had other numbers of rows"
    return f", by the row of M {found}, as none has M {asked}"


def _held_out(record: Record) -> str:
    """Return what was measured at other M of a range: the loss against the best known there and the library."""
    regrets = sorted((int(m), f"{regret:.1%}", share) for m, (regret, share) in record.held_out.items())
    return "; ".join(
        f"M {m}: {share:.3f}x {record.library or 'the library'}"
        + (f", {regret} slower than the best known there" if regret != "0.0%" else "")
        for m, regret, share in regrets
    )
