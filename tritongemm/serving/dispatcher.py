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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.scaling import Scaling
from tritongemm.core.served_call import CallSignature, LoadedKernel, Resolution
from tritongemm.core.support import Support
from tritongemm.operations import served_problems
from tritongemm.operations.checks import check_encodings, is_wrapped
from tritongemm.operations.contract import ProductOperation, Reading, ReadyCall
from tritongemm.operations.dense import DENSE, DenseOperands, are_transposed
from tritongemm.operations.torch_products import DTYPE_NAMES, float32_precision, is_plain, linear
from tritongemm.serving.calls import NOT_TUNED, CallKey, CallsByLayout, CallTable, ResolveAfterCalls, keep, plain_linear
from tritongemm.serving.choice_log import ChoiceLog
from tritongemm.serving.launching import OperandCall, prepare_layer
from tritongemm.serving.loaded_tables import (
    LoadedTable,
    LoadReport,
    announce,
    combined_digest,
    read_configured,
    read_shipped,
    read_table,
    warn_of_missing,
    why_layer_is_idle,
)
from tritongemm.serving.record_table import RecordTable
from tritongemm.system import settings

if TYPE_CHECKING:
    from tritongemm.plugins.contracts import KernelSource
    from tritongemm.serving.device_kernels import DeviceKernels
    from tritongemm.serving.serving_device import ServingDevice

_PRECISION = 6  # The place of float32's precision in a key.


@dataclass(frozen=True)
class CallAnswers:
    """What the sources of kernels answered for a call."""

    resolution: Resolution  # the answer that counts
    source: str = ""  # the name of the source that gave it; "" where none had to be asked
    # Names of the sources that were asked before it, and why they do not serve the call.
    refusals: tuple[tuple[str, Support], ...] = ()
    device: DeviceKernels | None = None  # the GPU and its kernels; None where none had to be asked
    reading: Reading | None = None  # what the operands mean; None where no source had to be asked

    @classmethod
    def pytorch(cls, reason: str, lasting: bool = True) -> CallAnswers:
        """Answer that PyTorch serves the call, without asking a source."""
        return cls(Resolution("fallback", reason, lasting=lasting))

    def prepared(self, prepare: Callable[[LoadedKernel, ServingDevice], ReadyCall], otherwise: ReadyCall) -> ReadyCall:
        """Return what serves calls: the launch of a kernel, or what computes calls without one.

        A kernel that can't be prepared leaves the call to the other, unless it was tuned for this very size: that it
        fails there must be seen.
        """
        if self.resolution.kernel is None or self.device is None:
            return otherwise
        try:
            return prepare(self.resolution.kernel, self.device.device)
        except (TritonGemmError, LookupError):
            if self.resolution.kind == "exact":
                raise
            return otherwise

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
        scaled_weights: (N, K) of the weights with scales that have a record, and the factors of A of these records.
        gated_weights: (N, K) of the weights of gate and up that have a record with their activation.
        packed_weights: N, K and B of the weights that alone have scales, of groups with their number in front, with the
            number of their records.
        expert_weights: the weights of grouped products that have a record.
        invariant_weights: (N, K) and whether they have scales, of layers with a record that states its order.
    """

    def __init__(self) -> None:
        self.calls = CallTable()
        self.weights: frozenset[tuple[int, int]] = frozenset()
        self.layer_weights: frozenset[tuple[int, int]] = frozenset()
        self.weights_by_layout: frozenset[tuple[int, int]] = frozenset()
        self.transposed_weights: frozenset[tuple[int, int]] = frozenset()
        self.scaled_weights: dict[tuple[int, int], frozenset[Scaling | None]] = {}
        self.gated_weights: frozenset[tuple[int, int]] = frozenset()
        self.packed_weights: Counter[tuple[Any, ...]] = Counter()
        self.expert_weights: frozenset[served_problems.ExpertWeights] = frozenset()
        self.invariant_weights: frozenset[tuple[int, int, bool]] = frozenset()
        self._records = RecordTable()
        self._records_read, self._times_added = False, 0
        self._choices, self._tables = ChoiceLog(), tuple[LoadedTable, ...]()
        self._invariant_for: list[object] = []
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

    @property
    def wants_invariant_rows(self) -> bool:
        """Whether rows must have the same bits at every M, as variables, PyTorch or patched models say."""
        return bool(self._invariant_for) or settings.invariant() or torch.are_deterministic_algorithms_enabled()

    def want_invariant_rows(self, owner: object, wanted: bool = True) -> None:
        """Have rows be invariant while any owner wants it; all calls are resolved anew."""
        if (wanted or self._invariant_for) and wanted != any(one is owner for one in self._invariant_for):
            self._invariant_for = [one for one in self._invariant_for if one is not owner] + [owner] * wanted
            self.calls = CallTable()

    def add_configured(self, or_shipped: bool = False) -> str:
        """Read the records that TRITONGEMM_CONFIG and AITER's variable name, if none were read before; no GPU starts.

        Args:
            or_shipped: read the shipped tables if this process has no others.

        Returns:
            What distinguishes the tables that this process has loaded from others; "" where it has loaded none.

        Raises:
            InputError: the file can't be read, or holds no tuned result.
        """
        with self._lock:
            if not self._records_read and (tables := read_configured()):
                self._add(*tables)
            if or_shipped and not self._tables:
                self._add(*read_shipped())
            self._records_read = True
            return combined_digest(self._tables) if self._tables else ""

    def withdraw(self) -> None:
        """Serve nothing any more, until records are added."""
        with self._lock:
            vars(self).update({**vars(Dispatcher()), "_lock": self._lock, "_records_read": True})

    def _add(self, *tables: LoadedTable) -> None:
        """Add tables' records, whose kernels a device loads at its next call."""
        self._tables += tables
        self._times_added += 1
        rows = [row for table in tables for row in table.rows]
        problems = {row.record.problem for row in rows}
        products = {p: served_problems.is_layer(p) for p in problems if served_problems.is_product(p)}
        self.layer_weights |= {(p.n, p.k) for p, of_layer in products.items() if of_layer}
        self.weights_by_layout |= {(p.n, p.k) for p, of_layer in products.items() if not of_layer}
        self.weights = self.layer_weights | self.weights_by_layout
        self.transposed_weights = frozenset((k, n) for n, k in self.weights)
        self.gated_weights |= {(p.n, p.k) for p in problems if p.fold > 1 and not p.groups}
        for p in filter(served_problems.is_scaled, problems):
            held = self.scaled_weights.get((p.n, p.k), frozenset())
            self.scaled_weights = {**self.scaled_weights, (p.n, p.k): held | {p.a.scaling}}
        self.packed_weights += Counter(filter(None, map(served_problems.packed_weight, problems)))
        stated = {p: served_problems.is_scaled(p) for p in (row.record.problem for row in rows if row.record.order)}
        self.invariant_weights |= {(p.n, p.k, scaled) for p, scaled in stated.items() if scaled or products.get(p)}
        self.expert_weights |= set(filter(None, map(served_problems.expert_weights, problems)))
        self._records, self._records_read = self._records.extend(rows), True
        self._former, self._devices = self._former | self._devices, {}
        self.calls = CallTable()

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Compute x @ w.T (+ bias) for plain tensors without gradient."""
        key = layer_key(x, w, bias, out_dtype)
        call = self.calls.table.get(key) or self.resolve_layer(key, DenseOperands(x, w, bias, out_dtype))
        return call(x, w, bias, out_dtype)

    def resolve_layer(self, key: CallKey, operands: DenseOperands, frequent: bool = False) -> ReadyCall:
        """Return what serves calls of `mm` of a key, kept in the table for the next one.

        The key's precision counts, as another thread may have changed PyTorch's meanwhile.
        """
        DENSE.check(operands)
        ready_calls, x, w = self.calls, operands.x, operands.w
        strided, lasting = x.layout == w.layout == torch.strided, True
        prepare = partial(self._prepare_layer, key, frequent)
        if strided and x.is_cuda and (w.shape in self.weights_by_layout or any(are_transposed(x, w))):
            ready: ReadyCall = CallsByLayout(prepare)
        else:
            ready, lasting = prepare(operands)
        if lasting and strided:  # A call that is not has the key of one that is.
            keep(ready_calls.table, key, ready)
        return ready

    def _prepare_layer(self, key: CallKey, frequent: bool, operands: DenseOperands) -> tuple[ReadyCall, bool]:
        """Return what serves calls of a key with operands of one memory layout, and whether it is lasting."""
        x, w, _, out_dtype = operands
        answers = self.ask(DENSE, operands, key[_PRECISION], frequent)
        ready: ReadyCall = plain_linear if is_plain(x, w, out_dtype) else linear
        is_pytorchs = answers.resolution.kind in NOT_TUNED and answers.resolution.kernel is None
        if not frequent and ready is plain_linear and is_pytorchs and x.is_cuda:
            ready = ResolveAfterCalls(partial(self.resolve_layer, key, frequent=True))
        if (reading := answers.reading) is not None:
            ready = answers.prepared(partial(prepare_layer, operands, reading, linear), ready)
        return ready, answers.resolution.lasting

    def resolve(self, operation: ProductOperation, key: CallKey, given: Any) -> ReadyCall:
        """Return what serves calls of a key, kept in the table for the next one.

        Raises:
            TypeError, InputError: operands that do not belong together.
        """
        ready_calls, checked = self.calls, operation.check(given)
        otherwise = operation.make_fallback(checked)
        if any(isinstance(one, Tensor) and is_wrapped(one) for one in given):
            return otherwise
        answers = self.ask(operation, checked)
        ready, reading = otherwise, answers.reading
        if reading is not None:
            ready = answers.prepared(partial(OperandCall, operation, given, reading, otherwise), otherwise)
        if answers.resolution.lasting:
            keep(ready_calls.table, key, ready)
        return ready

    def explain(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        frequent: bool = True,
    ) -> CallAnswers:
        """Return what serves calls of `mm` with operands of these shapes, dtypes and devices, as PyTorch is set.

        Raises:
            InputError: TRITONGEMM_CONFIG names a file that can't be read.
        """
        return self.ask(DENSE, DenseOperands(x, w, bias, out_dtype), frequent=frequent)

    def ask(
        self, operation: ProductOperation, checked: Any, precision: str | None = None, frequent: bool = True
    ) -> CallAnswers:
        """Return the answers of the kernel sources, up to the first that serves a call.

        float32 is multiplied as `precision` says, ``fp32`` or ``tf32``; where it is None as PyTorch is set.

        Raises:
            InputError: an fp8 encoding that the GPU does not compute.
        """
        first = operation.tensors(checked)["a"]
        if not first.is_cuda:
            if not self._records_read:
                warn_of_missing()
            name = operation.sources.get("a", "a")
            return CallAnswers.pytorch(f"{name} is on {first.device}; tuned kernels run on a GPU")
        reading = operation.read(checked)
        if isinstance(reading, Support):
            return CallAnswers.pytorch(reading.reason)
        device = self.device(first.get_device())
        if device is None:
            text = "not loaded on this device before a graph is captured; call tritongemm.load or run it once first"
            return CallAnswers.pytorch(text, lasting=False)
        if operation is not DENSE:  # PyTorch may have a layer of it
            check_encodings(reading.tensors, lambda: device.target)
        if not reading.problems:
            return CallAnswers.pytorch(reading.why_none)
        if any(problem.at(1) in device.waiting for problem in reading.problems):
            if torch.cuda.is_current_stream_capturing():
                text = "shipped tables load a product's kernels at its first call, not while a graph is captured"
                return CallAnswers.pytorch(text, lasting=False)
            self._load_waiting(device, reading.problems)
        precision = precision if reading.problems[0].a.dtype == "fp32" else "fp32"
        signature = CallSignature(
            reading.problems[0], precision or float32_precision(), reading.vector, frequent, self.wants_invariant_rows
        )
        return replace(self._answer(reading, signature, device), reading=reading)

    def _answer(self, reading: Reading, signature: CallSignature, device: DeviceKernels) -> CallAnswers:
        """Return what serves a call on a GPU.

        The first of the problems that has a tuned row counts, else the first that a row of another M serves, else the
        first.
        """
        rows = [device.find_row(problem) for problem in reading.problems]
        at = next((i for i, row in enumerate(rows) if not isinstance(row, Support)), None)
        if at is None:
            at = next((i for i, problem in enumerate(reading.problems) if device.near_rows(problem)), 0)
        call, row = replace(signature, problem=reading.problems[at]), rows[at]
        answers = _first_answer(self.sources, call, device)
        resolution = answers.resolution
        if reading.strides:
            resolution = device.move(resolution, call.problem, reading)
        where = resolution.where or ("" if isinstance(row, Support) else row.where)
        self._choices.log(call.problem.key, str(device.device.torch_device), resolution, where)
        return replace(answers, resolution=resolution)

    def why_layer_is_idle(self, holds: Callable[[Record], bool], index: int) -> str:
        """Return why no row serves a layer on a GPU; see `loaded_tables.why_layer_is_idle`."""
        return why_layer_is_idle(self._tables, holds, self.device_kernels(index))

    def device_kernels(self, index: int) -> DeviceKernels | None:
        """Return `device`; None for a CPU."""
        return self._devices.get(index) if index < 0 else self.device(index)

    def device(self, index: int) -> DeviceKernels | None:
        """Return the kernels of a device, loaded at its first use; None while a capture forbids loading."""
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

    def load_weights(self, weights: Iterable[Tensor], index: int) -> None:
        """Load the kernels of shipped rows of these weights [N, K], which the first call of each would load else."""
        if (device := self.device(index)) is not None and device.waiting:
            held = {(*w.shape, DTYPE_NAMES.get(w.dtype)) for w in weights}
            self._load_waiting(device, [p for p in device.waiting if (p.n, p.k, p.b.dtype) in held])

    def _load_waiting(self, device: DeviceKernels, problems: Sequence[Problem]) -> None:
        from tritongemm.serving import kernel_loading

        with self._lock:
            kernel_loading.load_waiting(device, problems)


def _first_answer(sources: Sequence[KernelSource], call: CallSignature, device: DeviceKernels) -> CallAnswers:
    refusals: list[tuple[str, Support]] = []
    for source in sources:
        answer = source.resolve(call, device)
        for reviewer in sources:
            if isinstance(answer, Resolution):
                answer = reviewer.review(answer, call, device)
        if isinstance(answer, Resolution):
            return CallAnswers(answer, source.name, tuple(refusals), device)
        refusals.append((source.name, answer))
    raise AssertionError("PyTorch's layer serves every call")


def layer_key(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> CallKey:
    """Return the key of a call of `mm`."""
    precision = float32_precision() if x.dtype is torch.float32 else None
    key: CallKey = (x.shape, w.shape, x.dtype, w.dtype, x.get_device(), out_dtype, precision)
    return key if bias is None else (*key, bias.shape, bias.dtype)


default = Dispatcher()  # of this process; tests put others in its place


def default_dispatcher() -> Dispatcher:
    """Return the dispatcher of this process, which the public functions and the custom operators share.

    To keep other records separate, create a `Dispatcher` and call its `run`.
    """
    return default
