"""The command line of `tritongemm check`: which tuned results still hold; others are raced again."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.cli import arguments, shell, tuned_rows
from tritongemm.core.errors import InputError
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.export.library import building, checking, storage
from tritongemm.export.library.checking import Checked, Claim, HeldLibrary
from tritongemm.export.library.storage import open_library
from tritongemm.formats import Defaults
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.machine import Machine
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins.contracts import Evaluator
from tritongemm.results import rewriting
from tritongemm.results.rewriting import HeldRows
from tritongemm.system import settings
from tritongemm.system.printable import printable
from tritongemm.tune import session
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.repair import Repair
from tritongemm.workloads import sizes

_COLUMNS = ("size", "M", "target", "winner", "state", "why")
_WORDS = ("size", "target", "winner", "state", "why")


@dataclass(frozen=True)
class _Source:
    """The results to check."""

    path: Path  # of a results file or a library
    claims: tuple[Claim, ...]  # its results
    damaged: tuple[str, ...]  # names of entries and rows that can't be read at all, with the reason

    @property
    def conflicts(self) -> list[str]:
        """A line for each product whose results add up in several orders."""
        return list(tuned_rows.list_conflicts(claim.record for claim in self.claims))

    @property
    def is_library(self) -> bool:
        """Whether it is a library of kernels."""
        return storage.is_library(self.path)


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = parser().parse_args(argv)
    here = machine.find_machine(None, args.gpus, machine.count_devices() if args.repair and not args.gpus else 0)
    source = _read(Path(args.source))
    cache = ArtifactCache(settings.cache_folder())
    cache.check()
    pool = BuildPool(cache, args.num_threads, args.timeout)
    try:
        found = checking.check(source.claims, here, pool)
        if args.json:
            _print_json(source, found, here)
        else:
            _print(source, found, here, args.verbose)
        stale = [one for one in found if one.stale]
        left = len(stale)
        if args.repair and stale:
            left -= _repair(source, stale, here, pool, args.timeout)
    finally:
        pool.close()
    return shell.WRONG if left or source.damaged or source.conflicts else shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm check")
    p.add_argument("source", type=arguments.path, metavar="FILE|LIBRARY", help="results, or a kernel library")
    g = p.add_mutually_exclusive_group()
    g.add_argument("--repair", action="store_true",
                   help="race invalid results again, with fast configs of the nearest sizes")  # fmt: skip
    g.add_argument("--json", action="store_true", help="print all that is found as JSON, for programs")
    arguments.add_gpus(p)
    arguments.add_compiling(p, "one compile, or of one request to the GPU,")
    arguments.add_verbose(p)
    return p


def _read(path: Path) -> _Source:
    """Return the results of a file or a library."""
    if storage.is_library(path) or path.is_dir():
        library = open_library(path)
        faults = library.faults()
        claims = [Claim(one.record, one.kernel, faults.pop(one.name, "")) for one in library.all_entries()]
        damaged = [f"{path}: {printable(name)}: {fault.removeprefix(f'{path}: ')}" for name, fault in faults.items()]
        left = ""
    else:
        found = sizes.from_results(path, Defaults())
        left = f": {found.describe_untuned()}"
        claims = [Claim(row.record) for row in found.rows if row.record is not None]
        damaged = [row.reason for row in found.damaged]
    if not claims and not damaged:
        raise InputError(f"{path}: holds no tuned result{left}; tune it first")
    return _Source(path, tuple(claims), tuple(damaged))


def _print(source: _Source, found: Sequence[Checked], here: Machine, verbose: bool) -> None:
    rows = [_row(one) for one in found]
    if rows:
        shell.answer_table(_COLUMNS, rows, _WORDS)
    shell.report_alike((f"damaged: {line}" for line in source.damaged), verbose)
    for line in source.conflicts:
        shell.report(line)
    for line in tuned_rows.list_calls([one.claim.record for one in found], every=False):
        shell.report(line)
    counts = Counter(one.state for one in found) + Counter({checking.DAMAGED: len(source.damaged)})
    listed = ", ".join(f"{count} {state}" for state, count in counts.items())
    versions = ", ".join(f"{name} {version}" for name, version in building.toolchain(here).items())
    where = f"{here.product} ({here.target.name})" if here.devices else "no GPU here"
    shell.answer(f"{source.path}: {listed} ({versions}; {where})")


def _print_json(source: _Source, found: Sequence[Checked], here: Machine) -> None:
    results = [
        {
            "size": one.claim.record.problem.key, "M": one.claim.record.problem.m, "M_from": one.claim.record.m_from,
            "target": one.claim.record.target, "winner": one.claim.record.winner, "state": one.state, "why": one.reason,
        }
        for one in found
    ]  # fmt: skip
    gpu = here.product if here.devices else None
    about = {"source": str(source.path), "toolchain": building.toolchain(here), "gpu": gpu, "results": results}
    print(json.dumps({**about, "damaged": source.damaged, "conflicts": source.conflicts}, indent=1))


def _row(one: Checked) -> list[str]:
    record, m = one.claim.record, one.claim.record.problem.m
    why = printable(one.reason) or "-"
    rows = f"{record.m_from}-{m}" if 0 < record.m_from < m else str(m)
    return [
        printable(record.problem.key), rows, printable(record.target or "-"), printable(record.winner), one.state, why
    ]  # fmt: skip


def _repair(source: _Source, stale: Sequence[Checked], here: Machine, pool: BuildPool, timeout: float) -> int:
    """Race stale results again, and write each new result when it is known; return how many were repaired."""
    if not here.devices:
        shell.report(f"{len(stale)} results are not repaired: they are raced on their GPU, and no GPU is here")
        return 0
    repaired = 0
    with closing(_held(source, here)) as held:
        records = [one.claim.record for one in stale if _is_there(held, one.claim.record)]
        if not records:
            return 0
        trials = {} if source.is_library else rewriting.read_trials(source.path, {r.problem for r in records})
        plan = TuningOptions(source.path.parent, toolchain=machine.toolchain(here))
        known = [claim.record for claim in source.claims]
        racing = replace(here, devices=here.devices[: len(records)])
        with (
            _devices(racing, timeout) as evaluators,
            closing(Repair(evaluators, pool, plan, held.replace, shell.report).repair(records, known, trials)) as done,
        ):
            for before, after in done:
                if isinstance(after, Support):
                    shell.report(f"not repaired: {before.problem.key}: {after}")
                else:
                    repaired += 1
                    print(f"repaired: {before.problem.key}: {_change(before, after)}", flush=True)
    return repaired


def _held(source: _Source, here: Machine) -> HeldRows | HeldLibrary:
    """Return the checked file, locked until it is closed."""
    return HeldLibrary(source.path, here) if source.is_library else HeldRows(source.path)


def _is_there(held: HeldRows | HeldLibrary, record: Record) -> bool:
    """Return whether a result is still as it was checked."""
    if there := held.has(record):
        return there
    shell.report(f"not repaired: {record.problem.key}: another program has changed it meanwhile; check again")
    return False


def _change(before: Record, after: Record) -> str:
    """Return the new kernel, and the times of both."""
    name = after.config.name if after.winner == after.config.backend else after.winner
    return f"{name} {after.served_seconds * 1e6:.2f} us (was {before.served_seconds * 1e6:.2f} us)"


@contextmanager
def _devices(here: Machine, timeout: float) -> Iterator[Sequence[Evaluator]]:
    protocol = MeasureProtocol(timer=session.pick_timer(None, here))
    evaluators = [GpuEvaluator(here.target, here.vendor, device, protocol, timeout) for device in here.devices]
    with ExitStack() as stack:
        for evaluator in evaluators:
            stack.callback(evaluator.close)
            evaluator.start()
        yield evaluators
