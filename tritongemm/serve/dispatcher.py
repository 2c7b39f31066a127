"""Stage: Problem at run time → a tuned kernel, or PyTorch. For inference: where a gradient is wanted, PyTorch serves.

Records come from `load` or, at the first call, from the file that TRITONGEMM_CONFIG names. Reading, compiling and
loading happen then; after that a call costs a lookup, patched addresses and a launch. Sizes without a tuned kernel are
PyTorch's; once a thread has called one often, PyTorch's kernel for it is learned, and launched from then on. What a
graph captures must have been loaded before: while capturing nothing is read, compiled or loaded, and PyTorch serves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tritongemm.core import settings
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.runtime.patched_launch import LoadedKernel
from tritongemm.serve.device_kernels import DeviceKernels
from tritongemm.serve.fast_call import FastCall
from tritongemm.serve.torch_fallback import NAMES, is_plain, linear, output_dtype, precision

_MOST_CALLS = 8192  # of one thread; sequences of any length must not fill the memory
_OFTEN = 64  # calls; a model of 32 layers has come by twice
Serve = Callable[[Tensor, Tensor, Tensor | None, torch.dtype | None], Tensor]


@dataclass(frozen=True)
class Resolution:
    """Who serves a call, and why.

    Attributes:
        kind: ``exact`` (the tuned kernel), ``library`` (it won the tuning) or ``fallback`` (no usable record).
        text: which kernel, the library's lead, or the reason.
        kernel, served: what is launched, and the device that it is loaded on; None where PyTorch is called. Other than
            for ``exact`` it is PyTorch's own kernel.
        lasting: whether an equal call will get the same verdict until other records are loaded.
    """

    kind: str
    text: str
    kernel: LoadedKernel | None = None
    served: DeviceKernels | None = None
    lasting: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def plainly(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """PyTorch's linear layer; `mm` knows this function and skips its frame."""
    return functional.linear(x, w, bias)


class LearnAfterCalls:
    """PyTorch's linear layer for a size without a tuned kernel, until it is called often: to learn which kernel PyTorch
    takes costs about 1 ms, which 250 calls save, and sequences of all lengths come by that do not return.

    Args:
        plan: what to do then; takes a call's arguments.
    """

    __slots__ = ("_left", "_plan")

    def __init__(self, plan: Callable[..., Serve]) -> None:
        self._left, self._plan = _OFTEN, plan

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        self._left -= 1
        if self._left > 0:
            return functional.linear(x, w, bias)
        return self._plan(x, w, bias, out_dtype)(x, w, bias, out_dtype)


class CallTable(threading.local):
    """Ready calls of one thread, by shapes, dtypes, device and, for float32, PyTorch's precision."""

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], Serve] = {}


def servable(problem: Problem) -> bool:
    """Whether `mm` can ask for a problem: x [M, K] row-major, a linear layer's w [N, K], a bias along N or none."""
    layout = problem.row_major_a and not problem.row_major_b and problem.bias in ("none", "n")
    return layout and problem.batch == 1 and problem.family == "dense"


def records_of(source: str | os.PathLike[str] | Iterable[Record]) -> list[Record]:
    """The records in a file of any format of interop/, or those given.

    Raises:
        InputError: the file can't be read, or holds no tuned result.
    """
    if not isinstance(source, str | os.PathLike):
        return list(source)
    from tritongemm.formats import Defaults
    from tritongemm.workloads.sizes import from_file

    found = [row.record for row in from_file(Path(source), Defaults()) if row.record is not None]
    if not found:
        raise InputError(f"{source}: holds sizes but no tuned result; tune it first")
    return found


class Dispatcher:
    """Tuned records, and what has been made of them on each device.

    Attributes:
        records: by target and problem.
        calls: ready calls of the present thread.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, Problem], Record] = {}
        self._devices: dict[int, DeviceKernels] = {}
        self._former: dict[int, DeviceKernels] = {}
        self.calls = CallTable()
        self._lock = threading.RLock()
        self._read = False

    def load(self, source: str | os.PathLike[str] | Iterable[Record]) -> int:
        """Add records, and make those of the current GPU ready; see `operation.load`."""
        usable = [r for r in records_of(source) if servable(r.problem)]
        with self._lock:
            self._read = True
            self.records |= {(r.target, r.problem): r for r in usable}
            self._former, self._devices = self._former | self._devices, {}
            if torch.cuda.is_available():
                self._served(torch.cuda.current_device())
            self.calls = CallTable()
        return len(usable)

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """X @ w.T (+ bias) for plain tensors that want no gradient. `mm` repeats these lines, to save a call."""
        now = precision() if x.dtype is torch.float32 else None
        if bias is None:
            key: tuple[Any, ...] = (x.shape, w.shape, x.dtype, w.dtype, x.get_device(), out_dtype, now)
        else:
            key = (x.shape, w.shape, x.dtype, w.dtype, x.get_device(), out_dtype, now, bias.shape, bias.dtype)
        return (self.calls.table.get(key) or self.plan(key, now, x, w, bias, out_dtype))(x, w, bias, out_dtype)

    def plan(
        self,
        key: tuple[Any, ...],
        now: str | None,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        often: bool = False,
    ) -> Serve:
        """What serves calls of this key, kept for the next one; `now`: the precision in it; `often`: after many calls,
        see `Waiting`.
        """
        calls = self.calls
        verdict = self.verdict(x, w, bias, out_dtype, often, now)
        made: Serve = plainly if is_plain(x, w, out_dtype) else linear
        if not often and made is plainly and verdict.kind == "fallback" and x.is_cuda:
            made = LearnAfterCalls(partial(self.plan, key, now, often=True))
        if verdict.kernel is not None and verdict.served is not None:
            shape = (*x.shape[:-1], w.shape[0])
            try:
                made = FastCall(verdict.kernel, verdict.served, shape, output_dtype(x, out_dtype))
            except (TritonGemmError, LookupError):
                if verdict.kind == "exact":
                    raise
        if verdict.lasting and x.layout == w.layout == torch.strided:  # a dense call has the same key
            if len(calls.table) >= _MOST_CALLS:
                calls.table.clear()
            calls.table[key] = made
        return made

    def verdict(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        often: bool = True,
        now: str | None = None,
    ) -> Resolution:
        """Who serves calls with operands of these shapes, dtypes and devices, if there are many or else a few of them,
        and if float32 is multiplied as `now` says, or as PyTorch is set.

        Raises:
            InputError: TRITONGEMM_CONFIG names a file that can't be read.
        """
        problem = _problem(x, w, bias, out_dtype)
        if isinstance(problem, str):
            return Resolution("fallback", problem)
        served = self._served(x.get_device())
        if served is None:
            text = "not loaded on this device before a graph is captured; call tritongemm.load or run it once first"
            return Resolution("fallback", text, lasting=False)
        record = self.records.get((served.arch, problem))
        kernel = served.kernels.get(problem) if record else None
        compute = now or precision() if problem.dtype_a == "fp32" else "fp32"
        if compute == "fp32" and problem in served.rounding and not isinstance(kernel, str):
            kernel = "tuned in tf32, while PyTorch multiplies float32 in full (torch.backends.cuda.matmul.allow_tf32)"
        if record is None or kernel is None or isinstance(kernel, str):
            reason = kernel if isinstance(kernel, str) else None
            kind, text = self._no_kernel(problem, served.arch, record, reason)
            # A vector is another operation to PyTorch. A capture must not be the first to ask for a kernel.
            asked = x.dim() > 1 and (often or kind == "library")
            direct = served.direct.find(problem, compute) if asked else None
            if direct is None:
                return Resolution(kind, text, lasting=not torch.cuda.is_current_stream_capturing())
            since = "" if kind == "library" else f" from call {_OFTEN} on"
            return Resolution(kind, f"{text}; PyTorch's kernel, called directly{since}", direct, served)
        gain = f", {record.speedup:.2f}x {record.library}" if record.speedup else ""
        return Resolution("exact", f"{record.config.name} ({record.seconds * 1e6:.2f} us{gain})", kernel, served)

    def _no_kernel(self, problem: Problem, arch: str, record: Record | None, reason: str | None) -> tuple[str, str]:
        """Kind and text of a verdict without a tuned kernel."""
        if record is None:
            return "fallback", self._unknown(problem, arch)
        if reason is not None:
            return "fallback", f"{problem.key} on {arch}: {reason}"
        if record.timer == "model":
            return "fallback", f"{problem.key}: its record is a prediction (timer: model); tune it on the GPU"
        if record.winner in ("torch", record.library):
            return "library", f"{record.winner} won the tuning of {problem.key} on {arch}"
        return "fallback", f"{problem.key}: its winner {record.winner} can't be called from here"

    def _unknown(self, problem: Problem, arch: str) -> str:
        others = sorted(target or "no target named" for target, p in self.records if p == problem)
        if others:
            return f"{problem.key} was tuned for {', '.join(others)}; this GPU is {arch}"
        return f"{problem.key} was never tuned for {arch}"

    def _served(self, index: int) -> DeviceKernels | None:
        """What a device serves, made on first use; None while a capture forbids that."""
        served = self._devices.get(index)
        if served is None and not torch.cuda.is_current_stream_capturing():
            with self._lock:
                path = settings.tuned_config()
                if not self._read and path is not None:
                    self.records = {(r.target, r.problem): r for r in records_of(path) if servable(r.problem)}
                self._read = True
                if index not in self._devices:
                    self._devices[index] = DeviceKernels(index, self.records, self._former.get(index))
                served = self._devices[index]
        return served


def _problem(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Problem | str:
    """The problem of a call, or why it is none that a kernel could solve."""
    if not x.is_cuda:
        return f"x is on {x.device}; tuned kernels run on a GPU"
    if x.layout != torch.strided or w.layout != torch.strided:
        return "an operand is sparse"
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        return f"x {tuple(x.shape)} and w {tuple(w.shape)} are not [..., K] and [N, K]"
    wanted = output_dtype(x, out_dtype)
    unknown = {x.dtype, w.dtype, wanted} - NAMES.keys()
    if unknown:
        return f"no kernels for {', '.join(sorted(map(str, unknown)))}"
    n, k = w.shape
    if not x.numel() or not w.numel():
        return "an operand is empty"
    kind = "none" if bias is None else "n"
    dtypes = NAMES[x.dtype], NAMES[w.dtype], NAMES[wanted]
    problem = Problem(x.numel() // k, n, k, *dtypes, row_major_b=False, bias=kind)
    if bias is not None and (tuple(bias.shape) != (n,) or NAMES.get(bias.dtype) != problem.bias_dtype.name):
        return f"the bias is {bias.dtype} {tuple(bias.shape)}; kernels take {problem.bias_dtype.torch} ({n},)"
    return problem
