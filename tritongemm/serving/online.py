"""Stage: a size that was never tuned → the fastest algorithm of the vendor's library, found while the program runs.

The first process that asks for a size tries the library's algorithms, within a budget of seconds, and keeps what it
found; later ones load that and try nothing. The program waits meanwhile. Nothing is tried while a graph is captured.

What was found is kept as a line of JSON for each size, and in AITER's CSV.
Any number of processes append to both at once, and read what others have found meanwhile. The lines are records; what
chooses one of them is the problem, the architecture and compute units of the device, and the library's version. A line
that can't be read is passed over. The CSV is for programs that read AITER's: it is written, and not read, as its keys
have neither the device nor the library nor a bias.
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles

import torch

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, OutputError, TritonGemmError
from tritongemm.core.integers import power_of_two
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import CallSignature, LoadedKernel
from tritongemm.core.support import Support
from tritongemm.operations.served_problems import is_layer
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend
from tritongemm.serving import calls
from tritongemm.serving.launching import FastCall
from tritongemm.serving.online_race import AlgorithmRace, OnlineOutcome, TimedAlgorithm
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.system import files, locks, settings
from tritongemm.system.printable import printable

_MOST_SIZES = 8192  # Sizes kept for one device; sequences of any length must not fill the memory.
_LEAST_WORKSPACE_BYTES = 1 << 20

FILE = "online_tuning.jsonl"
CSV_FILE = "hip_online_tuning_res.csv"
CSV_HEADER = (
    "preshuffle, use_rowwise, trans_a, trans_b, m, n, k, A_data_type, lda, stride_a, B_data_type, ldb, stride_b, "
    "C_data_type, ldc, stride_c, compute_type, batch_count, algo_index, kernel_name"
)
_ADVICE = "what was tried in this process is tried again in others"
_LOCK_SECONDS = 60.0  # another process writes for milliseconds
_MOST_BYTES = 64 << 20
_TYPES = {
    "bf16": "bf16_r",
    "fp16": "f16_r",
    "fp32": "f32_r",
    "fp8e4m3fnuz": "f8_e4m3_fnuz_r",
    "fp8e4m3fn": "f8_e4m3_r",
    "int8": "i8_r",
    "int32": "i32_r",
}

_Key = tuple[Problem, str, int]
MakeRace = Callable[[Problem, LibraryBackend, LibraryBackend, torch.device], AlgorithmRace]


class OnlineStore:
    """The records that processes of this user found."""

    def __init__(self, path: Path, csv: Path) -> None:
        self._path, self._csv = path, csv
        self._records: dict[_Key, list[Record]] = {}
        self._size = -1

    def find(self, problem: Problem, arch: str, compute_units: int, library: str, version: str) -> Record | None:
        """Return the last record of a problem on such a device, by this version of a library; None without one."""
        self._read()
        found = self._records.get((problem, arch, compute_units), [])
        return next((record for record in reversed(found) if record.toolchain.get(library) == version), None)

    def add(self, record: Record, algorithm: Config | None) -> None:
        """Keep a record; where a file can't be written, a warning says so."""
        self._append(self._path, json.dumps(record.to_json()), "", lambda text: True)
        if algorithm is not None:
            row = csv_row(record.problem, algorithm)
            twin = row.rsplit(",", 2)[0] + ","
            self._append(self._csv, row, CSV_HEADER, lambda text: f"\n{twin}" not in text)

    def _append(self, path: Path, line: str, header: str, is_wanted: Callable[[str], bool]) -> None:
        held_by_another = f"{path} can't be written: another process holds it; {_ADVICE}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locks.locked(path, held_by_another, _ADVICE, _LOCK_SECONDS):
                append_line(path, line, header, is_wanted)
        except OutputError as error:
            warnings.warn(str(error), stacklevel=2)
        except OSError as error:
            warnings.warn(f"{path} can't be written: {error.strerror}; {_ADVICE}", stacklevel=2)

    def _read(self) -> None:
        """Read the file again where it has changed."""
        try:
            size = self._path.lstat().st_size
            if size == self._size:
                return
            data = files.read_regular(self._path, _MOST_BYTES)
        except OSError:
            return
        self._size, self._records = size, {}
        for line in data.split(b"\n"):
            record = _record(line)
            if record is not None:
                key = record.problem, record.target, record.compute_units
                self._records.setdefault(key, []).append(record)


def _record(line: bytes) -> Record | None:
    """Return what a line says; None where it says nothing that `mm` could ask for."""
    try:
        record = Record.from_json(json.loads(line))
        return record if is_layer(record.problem) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError):
        return None


def append_line(path: Path, line: str, header: str, is_wanted: Callable[[str], bool]) -> None:
    """Append a line to a text that no other process appends to meanwhile.

    Raises:
        OSError: it can't be written, or begins with another line.
    """
    descriptor = files.open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "replace")
        if header and text and text.split("\n", 1)[0].rstrip() != header:
            raise OSError(0, "it begins with another line than AITER's files of this name do")
        if is_wanted(text):
            # A process that was killed may have left a line without its end.
            start = f"{header}\n" if header and not text else "\n" if text and not text.endswith("\n") else ""
            file.write(f"{start}{line}\n".encode())


def csv_row(problem: Problem, algorithm: Config) -> str:
    """Return a row of AITER's file: column-major, so that m counts the columns of C and n its rows, A is the weight."""
    m, n, k = problem.n, problem.m, problem.k
    a, b, c = (_TYPES.get(name, name) for name in (problem.b.dtype, problem.a.dtype, problem.c.dtype))
    compute = "i32_r" if problem.a.type.is_integer else "f32_r"
    sides = (a, k, 0, b, k, 0, c, m, 0)
    kernel = (algorithm.option("index", -1), algorithm.template)
    return ",".join(map(str, ("false", "false", "T", "N", m, n, k, *sides, compute, 1, *kernel)))


@dataclass(frozen=True)
class OnlineKernel:
    """An algorithm that was found while a program ran, loaded on the device, and the record of how."""

    record: Record
    kernel: LoadedKernel


class OnlineBudget:
    """Seconds that may be spent on algorithms: of a size, beside asking the library, and of all sizes of a process."""

    def __init__(self, size_seconds: float, process_seconds: float) -> None:
        self.process_seconds, self._size_seconds, self._spent = process_seconds, size_seconds, 0.0

    def next_seconds(self) -> float:
        """Return the seconds for the next size; 0 where all are spent."""
        return max(0.0, min(self._size_seconds, self.process_seconds - self._spent))

    def spend(self, seconds: float) -> None:
        """Take off what a size took."""
        self._spent += seconds


class OnlineTuner:
    """The algorithms found for one device."""

    def __init__(
        self,
        device: ServingDevice,
        store: OnlineStore,
        budget: OnlineBudget,
        library: LibraryBackend | None,
        make_race: MakeRace = AlgorithmRace,
    ) -> None:
        self._device, self._store, self._budget = device, store, budget
        self._library, self._make_race = library, make_race
        self._known: dict[Problem, OnlineKernel | Support] = {}
        self._lock = threading.Lock()

    def find(self, call: CallSignature) -> OnlineKernel | Support:
        """Return the fastest algorithm of a call, or why there is none."""
        problem = call.problem
        if call.vector:
            return Support("x is a vector, which is another operation to PyTorch")
        if problem.a.dtype == "fp32" and call.precision == "fp32":
            return Support("algorithms are tried in tf32, while PyTorch multiplies float32 in full")
        known = self._known.get(problem)
        if known is not None:
            return known
        if torch.cuda.is_current_stream_capturing():
            return Support("a graph is being captured; no algorithms are tried meanwhile")
        if problem.m > calls.MOST_ROWS_AT_ONCE and not call.frequent:
            return Support(
                f"more than {calls.MOST_ROWS_AT_ONCE} rows are tried at call {calls.FREQUENT_CALLS} of a size"
            )
        if not self._lock.acquire(blocking=False):
            return Support("another thread is trying algorithms")
        try:
            known = self._known.get(problem)
            return self._resolve(problem) if known is None else known
        finally:
            self._lock.release()

    def _resolve(self, problem: Problem) -> OnlineKernel | Support:
        device = self._device
        with torch.cuda.device(device.index), device.driver_device.relaxed():
            try:  # Whatever goes wrong, PyTorch itself is there.
                found = self._find_or_try(problem)
            except (TritonGemmError, LookupError, torch.cuda.OutOfMemoryError) as error:
                found = Support(f"no algorithms could be tried: {' '.join(str(error).split())}")
        if found is None:
            return Support(f"the {self._budget.process_seconds:g} s for trying algorithms are spent")
        if len(self._known) >= _MOST_SIZES:
            self._known.clear()
        self._known[problem] = found
        return found

    def _find_or_try(self, problem: Problem) -> OnlineKernel | Support | None:
        """Return what was found before, or is found now; None where there is no time left."""
        device, library = self._device, self._library
        if library is None:
            return Support("no library whose algorithms could be tried is here")
        version = library.version()
        record = self._store.find(problem, device.arch, device.compute_units, library.name, version)
        if record is None:
            if not self._budget.next_seconds():
                return None
            return self._try(problem, library, version)
        return self._load(record, library, None)

    def _try(self, problem: Problem, library: LibraryBackend, version: str) -> OnlineKernel | Support:
        """Return the winner of a race, which is kept where anything was tried in time."""
        started = time.monotonic()
        try:
            race = self._make_race(problem, library, registry.baseline(), self._device.torch_device)
            outcome = race.hold(self._budget.next_seconds())
        finally:
            self._budget.spend(time.monotonic() - started)
        if not outcome.tried:
            return Support("no algorithm could be tried in time")
        if outcome.baseline_wrong:
            torch_name = f"{registry.baseline().name} {settings.version('torch')}"
            fault = f"{problem.key}: {torch_name} is wrong: {outcome.baseline_wrong}"
            warnings.warn(fault, stacklevel=2)
            if outcome.winner is None:
                return Support(f"{fault}; and none of {outcome.tried} algorithms is right")
        return self._load(self._keep(problem, library, version, outcome), library, race)

    def _keep(self, problem: Problem, library: LibraryBackend, version: str, outcome: OnlineOutcome) -> Record:
        """Return the record of a race, kept for other processes."""
        winner, baseline = outcome.winner, registry.baseline().name
        assert winner is not None, "nothing is kept where nothing is right"
        config = winner.config or outcome.listed[0]
        record = Record(
            problem=problem,
            target=self._device.arch,
            config=config,
            winner=library.name if winner.config else baseline,
            seconds=winner.seconds,
            spread=_spread(winner),
            timer="events",
            library_seconds=None if outcome.baseline_wrong else outcome.baseline.seconds,
            library=baseline,
            library_wrong=outcome.baseline_wrong,
            verified=f"online: {outcome.tried} algorithms, checked against float64",
            toolchain={library.name: version, "torch": settings.version("torch")},
            compute_units=self._device.compute_units,
        )
        self._store.add(record, config)
        return record

    def _load(self, record: Record, library: LibraryBackend, race: AlgorithmRace | None) -> OnlineKernel | Support:
        """Return the algorithm as calls launch it, which is checked too; a reason where the baseline won."""
        device, problem = self._device, record.problem
        if record.winner != library.name:
            return Support(f"{record.library} was the fastest for {problem.key} ({printable(record.verified)})")
        kernel = library.load(record, device.index, device.driver_device)
        if isinstance(kernel, Support):
            return kernel
        race = race or self._make_race(problem, library, registry.baseline(), device.torch_device)
        self._reserve(kernel.bytes("workspace"))
        c = race.operands["c"]
        call = FastCall(kernel, device, c.shape, c.dtype)
        a, b, bias = (race.operands[name].data_ptr() if name in race.operands else 0 for name in ("a", "b", "bias"))
        right = race.check(lambda: call.start(a, b, c.data_ptr(), bias))
        return OnlineKernel(record, kernel) if right else Support(f"{problem.key}: {right}")

    def _reserve(self, needed: int) -> None:
        """Provide a workspace of `needed` bytes; it grows by powers of two, as former ones are never freed."""
        pool = self._device.workspaces
        if needed > (pool.workspace_bytes if pool else 0):
            grown = max(_LEAST_WORKSPACE_BYTES, power_of_two(needed))
            self._device.reserve_workspaces(grown, pool.counter_bytes if pool else 0)


def _spread(timed: TimedAlgorithm) -> float:
    """Half the distance between the quartiles of the samples, relative to the median."""
    if len(timed.samples) < 2:
        return 0.0
    low, middle, high = quantiles(timed.samples, n=4)
    return (high - low) / 2 / middle


@cache
def process_budget() -> OnlineBudget:
    """Return the budget of this process, which its devices share."""
    return OnlineBudget(*settings.online_seconds())


def open_tuner(device: ServingDevice) -> OnlineTuner:
    """Return what tries algorithms on a device, with the files and the budget that the environment names.

    Raises:
        InputError: TRITONGEMM_ONLINE_SECONDS is no budget.
        UnavailableError: there is no folder to keep results in.
    """
    libraries = [backend for backend in registry.every(LibraryBackend) if not backend.baseline]
    store = OnlineStore(settings.cache_folder() / FILE, Path.cwd() / CSV_FILE)
    return OnlineTuner(device, store, process_budget(), next((b for b in libraries if b.available()), None))
