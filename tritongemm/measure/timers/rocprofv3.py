"""Timer: the external tool rocprofv3, which watches the generated module run the final race, and its kernel-trace CSV.

The module launches the finalists in turn with a mark before each launch, so the rows between two marks are those of one
launch: a kernel of ours is exactly one row by its own name, a library's operation may be several, the same each time.
Rows that are missing or of other kernels are an error. Candidates are screened with events: the tool starts a process.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tritongemm.codegen import modules
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError, busy_seconds
from tritongemm.measure.choose import BASELINE_ENTRY
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import LibraryBackend

LABEL = "rocprofv3"
VENDOR = "amd"
SCREEN = "events"
TOOL = "rocprofv3"
MARK = "next_launch"  # kernel of the generated module


def folders() -> list[Path]:
    """Where the tool is looked for after PATH: this Python's scripts and ROCm's."""
    return [Path(sys.executable).parent, Path("/opt/rocm/bin"), *sorted(Path("/opt").glob("rocm-*/bin"), reverse=True)]


def tool() -> str:
    """Path of the tool.

    Raises:
        UnavailableError: it is nowhere; says where it was looked for.
    """
    places = folders()
    found = shutil.which(TOOL) or next((f for p in places if (f := shutil.which(TOOL, path=str(p)))), None)
    if found is None:
        raise UnavailableError(f"{TOOL}: not found on PATH nor in {', '.join(map(str, places))}; it comes with ROCm")
    return found


def unavailable() -> str | None:
    """Why the tool can't be used, or None."""
    try:
        tool()
    except UnavailableError as error:
        return str(error)
    return None


def race(
    problem: Problem,
    target: Target,
    configs: Sequence[Config],
    library: str,
    device: int,
    rotating_mb: int,
    rounds: tuple[int, int],
    timeout: float,
) -> dict[str, list[float]]:
    """Seconds of each launch by config name, the library's under `choose.LIBRARY`.

    Args:
        problem, target: what is run and where.
        configs: verified finalists, Triton's only.
        library: ``torch`` to race it too, or "".
        device: ordinal.
        rotating_mb: MB that the operands rotate through.
        rounds: (warm-up, timed) launches of each.
        timeout: seconds the tool may take.

    Raises:
        InputError: a config of another backend, which is not in the generated module.
        UnavailableError: no tool.
        TraceError: the tool or the module failed, or the trace has not the rows of the launches made.
    """
    strangers = sorted({c.backend for c in configs} - {"triton"})
    if strangers:
        raise InputError(
            f"{TOOL} watches the generated module, which has Triton's kernels only, not {', '.join(strangers)}"
        )
    with_library = bool(library) and bool(plugins.get(LibraryBackend, library).torch_function(problem))
    with tempfile.TemporaryDirectory() as folder:
        module = modules.write_candidates(problem, configs, target, Path(folder))
        names = [c.name for c in configs]
        watched = [sys.executable, str(module), "--trace", str(sum(rounds)), "--rotating-tensor", str(rotating_mb)]
        watched += ["--device", str(device), *(["--library"] if with_library else []), "--config", *names]
        output = Path(folder) / "trace"
        command = [tool(), "--kernel-trace", "-f", "csv", "-d", str(output), "--", *watched]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TraceError(f"{TOOL}: {problem.key} took more than {timeout:g} s") from None
        except OSError as error:
            raise TraceError(f"{TOOL}: {command[0]} can't be run: {error}") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-3:]
            raise TraceError(f"{TOOL}: exit status {done.returncode} for {problem.key}: {' | '.join(said)}")
        records = read(output)
    order = [*names, BASELINE_ENTRY] if with_library else names
    taken = launches(records, order, sum(rounds))
    return {name: seconds[rounds[0] :] for name, seconds in taken.items()}


def read(folder: Path) -> list[KernelRecord]:
    """The dispatches in the order of launching, of the one process whose trace has marks.

    Args:
        folder: what the tool was told to write to; its files lie in it or below, ``<pid>_kernel_trace.csv``.

    Raises:
        TraceError: no such file, several, or one that is not a kernel trace.
    """
    files = sorted(folder.rglob("*kernel_trace.csv"))
    traces = [t for t in map(_rows, files) if any(r.name == MARK for r in t)]
    if len(traces) != 1:
        raise TraceError(f"{TOOL}: {len(files)} kernel traces were written, {len(traces)} of them with marked launches")
    return traces[0]


def _rows(path: Path) -> list[KernelRecord]:
    """One file; columns differ between versions, these are in all: Kernel_Name, Start_Timestamp, End_Timestamp."""
    found: list[tuple[int, KernelRecord]] = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                start, end = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
                name = row["Kernel_Name"].removesuffix(".kd")
                found.append((int(row.get("Dispatch_Id") or start), KernelRecord(name, start, end)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise TraceError(f"{TOOL}: {path.name} is not a whole kernel trace: {error!r} in {row}") from error
    return [record for _, record in sorted(found, key=lambda pair: pair[0])]


def launches(records: Iterable[KernelRecord], names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each launch by name, from the rows between marks.

    Args:
        records: in the order of launching.
        names: what was launched in turn; `choose.LIBRARY` for an operation of unknown kernels.
        rounds: how often.

    Raises:
        TraceError: marks or rows are missing, too many, incomplete or of other kernels.
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
            raise TraceError(
                f"{TOOL}: launch {index} was {name or 'the library'}, its rows say {', '.join(seen) or 'nothing'}"
            )
        if any(not 0 < r.start_ns <= r.end_ns for r in part):
            raise TraceError(f"{TOOL}: launch {index}, {name or 'the library'}, has no valid start and end")
        found[name].append(busy_seconds(part))
    return found
