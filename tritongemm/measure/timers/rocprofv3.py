"""The timer that runs rocprofv3 on a generated module in the final race, and reads its kernel-trace CSV.

The module launches the finalists in turn with a mark before each launch, so the rows between two marks belong to one
launch: our kernel is exactly one row with its own name, a library's operation may be several rows, the same each
time. Rows that are missing or of other kernels are an error. Candidates are screened with events, as the tool starts a
process.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError, busy_seconds
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, ExternalRaceJob, ExternalTimer, LibraryBackend, SearchedBackend
from tritongemm.system.temporary_folder import TemporaryFolder

TOOL = "rocprofv3"
MARK = "next_launch"  # the kernel of the generated module that runs before each launch


class Rocprofv3Timer(ExternalTimer):
    """Times of kernels as AMD's command line profiler records them."""

    label = "rocprofv3"
    vendor = "amd"
    screens_with = "events"

    def available(self) -> Support:
        """Say whether the tool is installed."""
        try:
            tool()
        except UnavailableError as error:
            return Support(str(error))
        return SUPPORTED

    def races(self, backend: str) -> Support:
        """Say whether generated modules contain the kernels of a backend."""
        if isinstance(registry.get(Backend, backend), SearchedBackend):
            return SUPPORTED
        return Support(f"{TOOL} watches the generated module, which has no kernels of {backend}")

    def race(self, job: ExternalRaceJob) -> dict[str, list[float]]:
        """Return the seconds of each launch by config name, the baseline's under `BASELINE_ENTRY`.

        Raises:
            InputError: a config of a backend whose kernels are not in the generated module.
            UnavailableError: no tool.
            TraceError: the tool or the module failed, or the trace has not the rows of the launches made.
        """
        backends = sorted({c.backend for c in job.configs})
        for name in backends:
            if not (support := self.races(name)):
                raise InputError(support.reason)
        if len(backends) != 1:
            raise InputError(f"a generated module has the kernels of one backend, not of {' and '.join(backends)}")
        backend = registry.get(SearchedBackend, backends[0])
        launches = job.warmup + job.iters
        with_baseline = bool(job.baseline) and bool(
            registry.get(LibraryBackend, job.baseline).torch_function(job.problem)
        )
        names = [c.name for c in job.configs]
        with TemporaryFolder() as folder:
            module = backend.write_candidates(job.problem, job.configs, job.target, folder)
            watched = [sys.executable, str(module), "--trace", str(launches), "--rotating-tensor", str(job.rotating_mb)]
            watched += ["--device", str(job.device), *(["--library"] if with_baseline else []), "--config", *names]
            output = folder / "trace"
            _watch(watched, output, job)
            records = read_trace(output)
        order = [*names, BASELINE_ENTRY] if with_baseline else names
        seconds = launch_seconds(records, order, launches)
        return {name: each[job.warmup :] for name, each in seconds.items()}


def _watch(command: Sequence[str], output: Path, job: ExternalRaceJob) -> None:
    """Run a command under the tool, which writes its trace into the folder `output`."""
    traced = [tool(), "--kernel-trace", "-f", "csv", "-d", str(output), "--", *command]
    key = job.problem.key
    try:
        done = subprocess.run(
            traced, cwd=output.parent, capture_output=True, encoding="utf-8", errors="replace", timeout=job.timeout_s
        )
    except subprocess.TimeoutExpired:
        raise TraceError(f"{TOOL}: {key} took more than {job.timeout_s:g} s") from None
    except OSError as error:
        raise TraceError(f"{TOOL}: {traced[0]} can't be run: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-3:]
        raise TraceError(f"{TOOL}: exit status {done.returncode} for {key}: {' | '.join(said)}")


def folders() -> list[Path]:
    """Return the folders that are searched for the tool after PATH: this Python's scripts and ROCm's."""
    return [Path(sys.executable).parent, *libraries.rocm_folders("bin")]


def tool() -> str:
    """Return the path of the tool. Raises UnavailableError: it is nowhere; says where it was looked for."""
    places = folders()
    found = shutil.which(TOOL) or next((f for p in places if (f := shutil.which(TOOL, path=str(p)))), None)
    if found is None:
        raise UnavailableError(f"{TOOL}: not found on PATH nor in {', '.join(map(str, places))}; it comes with ROCm")
    return found


def read_trace(folder: Path) -> list[KernelRecord]:
    """Return the dispatches in the order of launching, from the one process whose trace has marks.

    Its file is in the tool's output folder or below, ``<pid>_kernel_trace.csv``; a TraceError if it is not, or is no
    trace.
    """
    files = sorted(folder.rglob("*kernel_trace.csv"))
    traces = [t for t in map(_rows, files) if any(r.name == MARK for r in t)]
    if len(traces) != 1:
        raise TraceError(f"{TOOL}: {len(files)} kernel traces were written, {len(traces)} of them with marked launches")
    return traces[0]


def _rows(path: Path) -> list[KernelRecord]:
    """Return the records of a trace file, from columns of all versions: Kernel_Name, Start_Timestamp, End_Timestamp."""
    found: list[tuple[int, KernelRecord]] = []
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        for row in csv.DictReader(lines):
            try:
                start, end = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
                name = row["Kernel_Name"].removesuffix(".kd")
                found.append((int(row.get("Dispatch_Id") or start), KernelRecord(name, start, end)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise TraceError(f"{TOOL}: {path.name} is not a complete kernel trace: {error!r} in {row}") from error
    return [record for _, record in sorted(found, key=lambda pair: pair[0])]


def launch_seconds(records: Iterable[KernelRecord], names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return seconds of each launch by name, from the rows between marks; a TraceError where these are not as launched.

    The names are launched in turn, `rounds` times each; `BASELINE_ENTRY` is an operation of unknown kernels.
    """
    parts: list[list[KernelRecord]] = []
    for record in records:
        if record.name == MARK:
            parts.append([])
        elif parts:
            parts[-1].append(record)
    expected = rounds * len(names)
    if len(parts) != expected + 1:
        raise TraceError(f"{TOOL}: {expected} launches were made, the trace has {max(0, len(parts) - 1)}")
    found: dict[str, list[float]] = {name: [] for name in names}
    kernels = {name: [name] for name in names if name != BASELINE_ENTRY}
    for index, part in enumerate(parts[:-1]):
        name = names[index % len(names)]
        seen = [r.name for r in part]
        if not seen or seen != kernels.setdefault(name, seen):
            raise TraceError(f"{TOOL}: launch {index} was {name}, its rows say {', '.join(seen) or 'nothing'}")
        if any(not 0 < r.start_ns <= r.end_ns for r in part):
            raise TraceError(f"{TOOL}: launch {index}, {name}, has no valid start and end")
        found[name].append(busy_seconds(part))
    return found
