"""Stage: a call at run time → a kernel or PyTorch. For inference: where a gradient is wanted, PyTorch computes.

A call is looked up in a table, or else resolved: the plug-ins of serve/sources are asked in the order of their ranks,
and the first that has an answer is kept in the table. Records come from `load` or, at the first call, from the file
that TRITONGEMM_CONFIG names. Reading, compiling and loading happen then; after that a call costs a lookup, patched
addresses and a launch. What a graph captures must have been loaded before: while capturing nothing is read, compiled or
loaded, and PyTorch computes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.record import Record
from tritongemm.core.serving import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.operations.served_problems import ExpertWeights, coinciding
from tritongemm.operations.torch_products import float32_precision, is_plain, linear, output_dtype, torch_linear
from tritongemm.serving import calls
from tritongemm.serving.calls import CallOperands, are_transposed, keep, sign_call
from tritongemm.serving.choice_log import ChoiceLog
from tritongemm.serving.config_files import read_configured
from tritongemm.serving.fast_call import FastCall, ReadyCall, prepare_call
from tritongemm.serving.loaded_tables import (
    LoadedTable,
    LoadReport,
    announce,
    combined_digest,
    read_table,
    why_weight_is_idle,
)
from tritongemm.serving.record_table import RecordTable

if TYPE_CHECKING:
    from tritongemm.plugins.contracts import KernelSource
    from tritongemm.serving.device_kernels import DeviceKernels

_PRECISION = 6  # The place of float32's precision in a key.

# Shapes of x and w, their dtypes, x's device, the dtype asked for, float32's precision (None for other dtypes), and the
# shape and dtype of a bias.
CallKey: TypeAlias = tuple[Any, ...]


def plain_linear(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """PyTorch's linear layer; `mm` knows this function and skips its frame."""
    return torch_linear(x, w, bias)


class LearnAfterCalls:
    """PyTorch's linear layer until a size is frequent, and what it is resolved to from then on.

    To find the kernel that PyTorch launches costs about 1 ms, which 250 calls save, and sequences of all lengths come
    by that do not return.

    Args:
        resolve: resolves a frequent call of the size.
    """

    __slots__ = ("_calls_left", "_resolve")

    def __init__(self, resolve: Callable[[CallOperands], ReadyCall]) -> None:
        self._calls_left, self._resolve = calls.FREQUENT_CALLS, resolve

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The result of PyTorch's linear layer, or of what the size is resolved to."""
        self._calls_left -= 1
        if self._calls_left > 0:
            return torch_linear(x, w, bias)
        return self._resolve(CallOperands(x, w, bias, out_dtype))(x, w, bias, out_dtype)


class CallsByLayout:
    """The ready calls of one size by the memory layout of its operands; belongs to one thread.

    A size has this in the table where rows are of other layouts than a linear layer's, or where its first operands
    were. Every other size is spared the question.

    Args:
        prepare: gives the ready call of operands, and whether equal operands will have the same.
    """

    __slots__ = ("_calls", "_prepare")

    def __init__(self, prepare: Callable[[CallOperands], tuple[ReadyCall, bool]]) -> None:
        self._prepare, self._calls = prepare, dict[tuple[bool, bool], ReadyCall]()

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The result of the call that is ready for this layout, which is made ready where it is the first."""
        if not x.layout == w.layout == torch.strided:
            return linear(x, w, bias, out_dtype)
        layout = x.is_contiguous(), w.is_contiguous()
        call = self._calls.get(layout)
        if call is None:
            call, lasting = self._prepare(CallOperands(x, w, bias, out_dtype))
            if lasting:
                self._calls[layout] = call
        return call(x, w, bias, out_dtype)


class CallTable(threading.local):
    """Ready calls of one thread, by shapes, dtypes, device and, for float32, PyTorch's precision.

    Keys of `scaled_mm` are longer than those of `mm`, and its calls take other operands.
    """

    def __init__(self) -> None:
        self.table: dict[CallKey, Callable[..., Tensor]] = {}


@dataclass(frozen=True)
class CallAnswers:
    """What the sources of kernels answered for a call.

    Attributes:
        resolution: the answer that counts.
        source: the name of the source that gave it; "" where none had to be asked.
        refusals: names of the sources that were asked before it, and why they do not serve the call.
        device: the GPU and its kernels; None where none had to be asked.
    """

    resolution: Resolution
    source: str = ""
    refusals: tuple[tuple[str, Support], ...] = ()
    device: DeviceKernels | None = None

    @classmethod
    def pytorch(cls, reason: str, lasting: bool = True) -> CallAnswers:
        """PyTorch serves the call, which no source had to be asked for."""
        return cls(Resolution("fallback", reason, lasting=lasting))

    def __str__(self) -> str:
        lines = [f"  {source} declines: {refusal}" for source, refusal in self.refusals]
        lines += [f"  {self.source} serves the call"] if self.source else []
        return "\n".join([str(self.resolution), *lines])


class Dispatcher:
    """Tuned records, what has been loaded of them on each device, and the ready calls of each thread.

    Attributes:
        calls: ready calls of the present thread. Another object takes its place when records are added.
        weights: (N, K) of the weights that have a record.
        layer_weights: those of them that have a record of a linear layer's own memory layout.
        weights_by_layout: those of them that have a record for x or w a transposed view, in which calls may differ.
        transposed_weights: the same as (K, N), the shape of the right operand of a product.
        scaled_weights: (N, K) of the weights with scales that have a record.
        expert_weights: the weights of grouped products that have a record.
    """

    def __init__(self) -> None:
        self.calls = CallTable()
        self.weights: frozenset[tuple[int, int]] = frozenset()
        self.layer_weights: frozenset[tuple[int, int]] = frozenset()
        self.weights_by_layout: frozenset[tuple[int, int]] = frozenset()
        self.transposed_weights: frozenset[tuple[int, int]] = frozenset()
        self.scaled_weights: frozenset[tuple[int, int]] = frozenset()
        self.expert_weights: frozenset[ExpertWeights] = frozenset()
        self._tables: tuple[LoadedTable, ...] = ()
        self._records = RecordTable()
        self._records_read = False
        self._times_added = 0
        self._choices = ChoiceLog()
        self._devices: dict[int, DeviceKernels] = {}
        self._former: dict[int, DeviceKernels] = {}
        self._lock = threading.RLock()

    @cached_property
    def sources(self) -> tuple[KernelSource, ...]:
        """The sources of kernels in the order in which they are asked."""
        from tritongemm.plugins import registry
        from tritongemm.plugins.contracts import KernelSource

        return tuple(sorted(registry.every(KernelSource), key=lambda source: (source.rank, source.name)))

    def load(self, source: str | os.PathLike[str] | Iterable[Record]) -> LoadReport:
        """Add records, and load those of the current GPU; see `api.load`."""
        table = read_table(source)
        with self._lock:
            self._add(table)
            device = self.device(torch.cuda.current_device()) if torch.cuda.is_available() else None
            self.calls = CallTable()
        return LoadReport(table, device)

    def add_configured(self) -> str:
        """Read the records that TRITONGEMM_CONFIG and AITER's variable name, if none were read before; no GPU starts.

        Returns:
            What tells the tables that this process has loaded from others; "" where it has loaded none.

        Raises:
            InputError: the file can't be read, or holds no tuned result.
        """
        with self._lock:
            if not self._records_read and (tables := read_configured()):
                self._add(*tables)
            self._records_read = True
            return combined_digest(self._tables) if self._tables else ""

    def _add(self, *tables: LoadedTable) -> None:
        """Add tables' records, whose kernels a device loads at its next call."""
        self._tables += tables
        self._times_added += 1
        self.weights = self.weights.union(*(table.weights for table in tables))
        self.layer_weights = self.layer_weights.union(*(table.layer_weights for table in tables))
        self.weights_by_layout = self.weights_by_layout.union(*(table.weights_by_layout for table in tables))
        self.transposed_weights = frozenset((k, n) for n, k in self.weights)
        self.scaled_weights = self.scaled_weights.union(*(table.scaled_weights for table in tables))
        self.expert_weights = self.expert_weights.union(*(table.expert_weights for table in tables))
        self._records, self._records_read = self._records.extend(row for table in tables for row in table.rows), True
        self._former, self._devices = self._former | self._devices, {}
        self.calls = CallTable()

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """X @ w.T (+ bias) for plain tensors that want no gradient. `mm` repeats these lines, to save a call."""
        precision = float32_precision() if x.dtype is torch.float32 else None
        if bias is None:
            key: CallKey = (x.shape, w.shape, x.dtype, w.dtype, x.get_device(), out_dtype, precision)
        else:
            key = (x.shape, w.shape, x.dtype, w.dtype, x.get_device(), out_dtype, precision, bias.shape, bias.dtype)
        call = self.calls.table.get(key) or self.resolve(key, CallOperands(x, w, bias, out_dtype))
        return call(x, w, bias, out_dtype)

    def resolve(self, key: CallKey, operands: CallOperands, frequent: bool = False) -> ReadyCall:
        """What serves calls of a key, kept in the table for the next one.

        Args:
            key: of the call. Its precision counts, as another thread may have changed PyTorch's meanwhile.
            operands: the first call's.
            frequent: whether the size is called frequently.
        """
        ready_calls, x, w = self.calls, operands.x, operands.w
        strided, lasting = x.layout == w.layout == torch.strided, True
        prepare = partial(self._prepare, key, frequent)
        if strided and x.is_cuda and (w.shape in self.weights_by_layout or any(are_transposed(x, w))):
            ready: ReadyCall = CallsByLayout(prepare)
        else:
            ready, lasting = prepare(operands)
        if lasting and strided:  # A call that is not has the key of one that is.
            keep(ready_calls.table, key, ready)
        return ready

    def _prepare(self, key: CallKey, frequent: bool, operands: CallOperands) -> tuple[ReadyCall, bool]:
        """What serves calls of a key with operands of one memory layout, and whether equal calls will have the same."""
        x, w, _, out_dtype = operands
        answers = self._ask_sources(operands, key[_PRECISION], frequent)
        resolution, device = answers.resolution, answers.device
        ready: ReadyCall = plain_linear if is_plain(x, w, out_dtype) else linear
        if not frequent and ready is plain_linear and resolution.kind == "fallback" and x.is_cuda:
            ready = LearnAfterCalls(partial(self.resolve, key, frequent=True))
        if resolution.kernel is not None and device is not None:
            shape = (*x.shape[:-1], w.shape[0])
            try:
                ready = prepare_call(
                    partial(FastCall, resolution.kernel, device.device, shape, output_dtype(x, out_dtype)),
                    are_transposed(x, w),
                )
            except (TritonGemmError, LookupError):
                if resolution.kind == "exact":
                    raise
        return ready, resolution.lasting

    def explain(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        frequent: bool = True,
    ) -> CallAnswers:
        """Who serves calls with operands of these shapes, dtypes and devices, as PyTorch is set.

        Raises:
            InputError: TRITONGEMM_CONFIG names a file that can't be read.
        """
        return self._ask_sources(CallOperands(x, w, bias, out_dtype), None, frequent)

    def _ask_sources(self, operands: CallOperands, precision: str | None, frequent: bool) -> CallAnswers:
        """The sources' answers, up to the first that serves the call; arguments are those of `sign_call`."""
        call = sign_call(operands, precision, frequent)
        if isinstance(call, Support):
            return CallAnswers.pytorch(call.reason)
        readings = [replace(call, problem=problem) for problem in coinciding(call.problem)]
        return self.answer(readings, operands.x.get_device())

    def answer(self, readings: Sequence[CallSignature], index: int) -> CallAnswers:
        """Who serves a call on a GPU.

        Args:
            readings: what the call can be taken for, where its operands are those of several problems. The first that
                has a tuned row counts, else the first that a row of another M serves, else the first.
            index: the GPU's number, as PyTorch counts.
        """
        device = self.device(index)
        if device is None:
            text = "not loaded on this device before a graph is captured; call tritongemm.load or run it once first"
            return CallAnswers.pytorch(text, lasting=False)
        rows = [device.find_row(reading.problem) for reading in readings]
        at = next((i for i, row in enumerate(rows) if not isinstance(row, Support)), None)
        if at is None:
            at = next((i for i, reading in enumerate(readings) if device.near_rows(reading.problem)), 0)
        call, row = readings[at], rows[at]
        answers = _first_answer(self.sources, call, device)
        where = answers.resolution.where or ("" if isinstance(row, Support) else row.where)
        self._choices.log(call.problem.key, str(device.device.torch_device), answers.resolution, where)
        return answers

    def why_layer_is_idle(self, weight: tuple[int, int], index: int) -> str:
        """Why no row serves a linear layer of some N and K on a GPU; see `loaded_tables.why_weight_is_idle`."""
        return why_weight_is_idle(self._tables, weight, self.device_kernels(index))

    def device_kernels(self, index: int) -> DeviceKernels | None:
        """As `device`; None for a CPU."""
        return self._devices.get(index) if index < 0 else self.device(index)

    def device(self, index: int) -> DeviceKernels | None:
        """The kernels of a device, loaded at its first use; None while a capture forbids loading."""
        device = self._devices.get(index)
        if device is None and not torch.cuda.is_current_stream_capturing():
            with self._lock:
                self.add_configured()
                if index not in self._devices:
                    from tritongemm.serving import kernel_loading  # which imports what it takes to compile

                    libraries = tuple(table.library for table in self._tables if table.library is not None)
                    self._devices[index] = kernel_loading.load_device(
                        index, self._records, self._former.get(index), libraries
                    )
                    announce(self._tables, self._devices[index], self._times_added)
                device = self._devices[index]
        return device


def _first_answer(sources: Iterable[KernelSource], call: CallSignature, device: DeviceKernels) -> CallAnswers:
    refusals: list[tuple[str, Support]] = []
    for source in sources:
        answer = source.resolve(call, device)
        if isinstance(answer, Resolution):
            return CallAnswers(answer, source.name, tuple(refusals), device)
        refusals.append((source.name, answer))
    raise AssertionError("PyTorch's layer serves every call")
