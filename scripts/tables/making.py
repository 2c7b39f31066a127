"""Makes tables over M on this machine's GPUs, one process for each, within a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.tables.products import Product
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.formats import read_text, results_format
from tritongemm.system import files

_FIRST, _MOST = 3, 6  # products of a GPU's first run, and of the later ones
_TO_END_S = 25.0  # that a run may take to write what it has
_YEAR_S = 365 * 24 * 3600.0
_SIZES, _RESULTS, _LOG = "sizes.yaml", "tables.yaml", "log"


def read_made(path: Path) -> list[Record]:
    """Return the rows of finished tables; none where there is no file."""
    if not path.exists():
        return []
    rows = results_format().read_results(path, read_text(path), Defaults()).rows
    return [row.record for row in rows if row.record is not None]


@dataclass
class TableMaker:
    """Makes tables until none is left or the time is over.

    Attributes:
        products: those that are left, in their order.
        output: gets the rows of finished tables.
        work: folder of the runs; what an earlier process left unfinished there is gone on with.
        head: first lines of the output.
        seconds: until everything must be written; 0 for no limit.
        options: further options of `tritongemm tune`.
    """

    products: list[Product]
    output: Path
    work: Path
    head: str = ""
    seconds: float = 0.0
    options: Sequence[str] = ()
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = read_made(self.output)
        done = {record.problem.at(1) for record in self.made}
        self.products = [product for product in self.products if product.problem not in done]
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._unfinished = sorted(folder.parent for folder in self.work.glob(f"*/{_SIZES}"))
        self._count = max((int(folder.name.partition("_")[0]) for folder in self.work.glob("*_*")), default=0)
        self._rate = 0.0  # seconds that a table takes a GPU

    def run(self, gpus: Sequence[str], say: Callable[[str], None]) -> None:
        """Make tables on GPUs, named by their ordinals; "" for a run without one."""
        cores = max(1, len(os.sched_getaffinity(0)) // len(gpus))
        workers = [threading.Thread(target=self._work, args=(gpu, cores, say)) for gpu in gpus]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _left(self) -> float:
        return self._begun + (self.seconds or _YEAR_S) - _TO_END_S - time.monotonic()

    def _work(self, gpu: str, cores: int, say: Callable[[str], None]) -> None:
        on_gpu = ["--gpus", gpu] if gpu else []
        while (folder := self._next()) is not None:
            begun = time.monotonic()
            status = self._tune(folder, [*on_gpu, "--num_threads", str(cores), *self.options])
            took = time.monotonic() - begun
            if status is None:
                say(f"GPU {gpu}: {folder} is not finished; the same command goes on with it")
                return
            found = list_problems(folder)
            if status:
                say(f"GPU {gpu}: failed with {status}, see {folder / _LOG}: {' '.join(_log(folder)[-1:])}")
                self.failed += [problem.key for problem in found]
                (folder / _SIZES).unlink()
                continue
            with self._lock:
                self.made += (rows := read_made(folder / _RESULTS))
                self._rate = max(took / len(found), 0.7 * self._rate)
                if rows:
                    files.atomic_write(self.output, self.head + results_format().write(self.made))
                (folder / _SIZES).unlink()
            keys = "; ".join(problem.product for problem in found)
            say(f"GPU {gpu}: {len(found)} tables in {took:.0f} s, {len(self.products)} products left: {keys}")
            for line in _log(folder):
                if "held-out" in line:
                    say(f"GPU {gpu}: {line}")

    def _next(self) -> Path | None:
        """Return the folder of the next run: an unfinished one, or one with the next products; None for the end."""
        with self._lock:
            if self._unfinished and self._left() > 0:
                folder = self._unfinished.pop(0)
                begun = set(list_problems(folder))
                self.products = [product for product in self.products if product.problem not in begun]
                return folder
            most = min(_MOST, int(self._left() / self._rate)) if self._rate else _FIRST * (self._left() > 0)
            if not self.products or most < 1:
                return None
            high = self.products[0].high
            near = self.products[: 2 * _MOST]  # tables of one run have one range of M
            taken = [product for product in near if product.high == high][:most]
            self.products = [product for product in self.products if product not in taken]
            self._count += 1
            folder = self.work / f"{self._count:03}_{high}"
            sizes = results_format().write_sizes(FormatRow(product.problem) for product in taken)
            files.atomic_write(folder / _SIZES, sizes)
            return folder

    def _tune(self, folder: Path, options: Sequence[str]) -> int | None:
        """Run `tritongemm tune` on the sizes of a folder; return its exit status, None where the time was over."""
        high = folder.name.rpartition("_")[2]
        command = [sys.executable, "-m", "tritongemm", "tune", "--gemm_size_file", _SIZES, "-o", _RESULTS]
        command += ["--m_range", f"1-{high}", *options]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"TRITONGEMM_CACHE": str(self.work.absolute() / "cache"), **os.environ, "PYTHONPATH": path}
        with (folder / _LOG).open("ab") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                return process.wait(max(0.0, self._left()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_TO_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return None


def _log(folder: Path) -> list[str]:
    return (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()


def list_problems(folder: Path) -> list[Problem]:
    """Return the products of a run, with an M of 1."""
    path = folder / _SIZES
    return [row.problem for row in results_format().read_results(path, read_text(path), Defaults()).rows]
