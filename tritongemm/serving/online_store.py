"""What was found while programs ran, kept for the next process: a line of JSON for each size, and AITER's CSV.

Any number of processes append to both at once, and read what others have found meanwhile. The lines are records; what
chooses one of them is the problem, the architecture and compute units of the device, and the library's version. A line
that can't be read is passed over. The CSV is for programs that read AITER's: it is written, and not read, as its keys
have neither the device nor the library nor a bias.
"""

import fcntl
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.operations.served_problems import is_layer
from tritongemm.system import files

FILE = "online_tuning.jsonl"
CSV_FILE = "hip_online_tuning_res.csv"
CSV_HEADER = (
    "preshuffle, use_rowwise, trans_a, trans_b, m, n, k, A_data_type, lda, stride_a, B_data_type, ldb, stride_b, "
    "C_data_type, ldc, stride_c, compute_type, batch_count, algo_index, kernel_name"
)
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, line, header, is_wanted)
        except OSError as error:
            text = f"{path} can't be written: {error.strerror}; what was tried in this process is tried again in others"
            warnings.warn(text, stacklevel=2)

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
    """Append a line to a text that other processes append to as well.

    Raises:
        OSError: it can't be written, or begins with another line.
    """
    descriptor = files.open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
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
