"""Products and mixtures of a server, which tuned kernels compute where a row has their M, and else the server itself.

A capture puts functions in the places of both that count what a server asks for, whatever computes it.

Rows were raced against PyTorch's product, and a server may have a faster one. So both are timed at the first call of
a kind. GPU time alone counts, and the GPU's cache holds none of the operands, as between the layers of a model.
Products of few rows are timed in graphs, others while the GPU is kept busy as the host launches a call.
"""

from __future__ import annotations

import functools
import logging
import statistics
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.core.scaling import PADDED_ROWS
from tritongemm.core.served_call import Resolution
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.contract import ProductOperation, ReadyCall
from tritongemm.operations.linear_act import ActivatedOperands
from tritongemm.operations.linear_w4 import FOUR_BIT_LAYER, FourBitOperands
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.serving.added_operations import key_of, linear_w4
from tritongemm.serving.calls import MOST_ROWS_AT_ONCE, NOT_TUNED, CallKey, keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.linear_fp8 import COPIED, BlockOperands, compute, copy_factors, find_layout
from tritongemm.serving.mixtures import fused_moe
from tritongemm.system import settings

Call: TypeAlias = Callable[[], Tensor]

_LOG = logging.getLogger("tritongemm")
_ROUNDS: Final = 5  # after one that loads and compiles
_CHAIN: Final = 8  # calls of a graph
_LEAST_GAIN: Final = 1.03  # A mixture that won such a race by 1.6 % was 3.5 % slower in a real model.
_BUSY_CYCLES: Final = tuple(2_000_000 << more for more in range(6))  # from about 1 ms to 32 ms
_capturing: Final = threading.Lock()
_failed: Final = list[Any]()  # graphs whose capture failed, which PyTorch's allocators may still ask for its number


class _RacedProducts:
    """The products of one operation that servers ask for. Which kernel computes equal calls is decided once.

    Args:
        operation: that of the products.
        read: returns the operands as a tuned kernel reads them, perhaps copied; None where the server computes a call.
            It is given the operands and what computes the call otherwise.
        copy: copies operands so.
    """

    def __init__(
        self, operation: ProductOperation, read: Callable[[Any, Call], Any], copy: Callable[[Any], Any] | None = None
    ) -> None:
        self._operation, self._read, self._copy = operation, read, copy
        self._find_compiled = self._compiled  # One object, whose address is part of a key of compiled code.

    def __call__(self, given: Any, otherwise: Call) -> Tensor:
        """Return a product, by a tuned kernel or by `otherwise`."""
        calls = default_dispatcher().calls
        served: Any = native_calls.serve(self._find_compiled, calls.compiled, *given)
        if served is None:
            served = (calls.table.get(self._key(*given)) or self._decide(given, otherwise))(*given)
        return otherwise() if served is False else served

    def _key(self, *given: Any) -> CallKey:
        return key_of("a server's", self._operation.name, *given)

    def _compiled(self, *given: Any) -> Any:
        return native_calls.compiled_form(default_dispatcher().calls.table.get(self._key(*given)), *given)

    def _decide(self, given: Any, otherwise: Call) -> ReadyCall:
        dispatcher, read = default_dispatcher(), self._read(given, otherwise)
        ready: ReadyCall = _decline
        if read is not None:
            ready = dispatcher.resolve(self._operation, self._key(*read), read)
            if read is not given:
                ready = partial(self._call_copied, ready)
        if read is not given and given[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            keep(dispatcher.calls.table, self._key(*given), ready)
        return ready

    def _call_copied(self, ready: ReadyCall, *given: Any) -> Tensor:
        assert self._copy is not None
        return ready(*self._copy(self._operation.operands(*given)))


def _decline(*given: Any) -> Any:
    """Return False: the server computes the call."""
    return False


def product_or(operands: BlockOperands, otherwise: Call) -> Tensor:
    """Return a product with scales by a tuned kernel, or by `otherwise` where no row has its M or that is faster.

    Where rows must be invariant, a kernel of the rows' order serves at every M, and nothing is timed.
    """
    x, weight, weight_scale, x_scale, bias, out_dtype, out = operands
    if x_scale is not None:  # what is multiplied as it is has one launch, found by one look
        return _scaled(ScaledOperands(x, weight, x_scale, weight_scale, bias, out_dtype, out=out), otherwise)
    layout = _find_layout(operands, otherwise)
    return otherwise() if layout is None else compute(operands, layout)


UNCOUNTED: Final = product_or  # in whose place a capture puts a function that counts


def _find_layout(operands: BlockOperands, otherwise: Call) -> str | None:
    """Return the layout of activations' factors for a tuned kernel; None where the server computes a call."""
    x, weight, dispatcher = operands.x, operands.weight, default_dispatcher()
    rows, decided = x.numel() // max(x.shape[-1], 1), dispatcher.calls.table
    kind = rows.bit_length(), x.dtype, weight.shape, operands.weight_scale.shape, x.get_device()
    key: Any = ("product", *kind, rows % PADDED_ROWS > 0)  # DeepGEMM's callers pad such rows, which takes long
    known: Any = decided.get(key) if operands.x_scale is None else None
    if known is False:  # Whatever the row: prompts are of a new length each, and a row is not found in no time.
        return None
    invariant = known is None and dispatcher.wants_invariant_rows  # which is asked at the first call of a size
    layout = find_layout(operands, near=invariant)
    if layout is None:
        if invariant:  # as may be while a graph is captured
            size = f"{tuple(x.shape)} by {tuple(weight.shape)}"
            warnings.warn(f"{size}: no kernel of the rows' order serves, so the server computes it", stacklevel=2)
        return None
    key = key if operands.x_scale is None else (*key, layout)
    return layout if invariant or pays(key, lambda: (partial(compute, operands, layout), otherwise)) else None


def _read_scaled(given: ScaledOperands, otherwise: Call) -> ScaledOperands | None:
    operands = BlockOperands(given.a, given.b, given.scale_b, given.scale_a, given.bias, given.out_dtype)
    layout = _find_layout(operands, otherwise)
    return None if layout is None else copy_factors(given) if layout == COPIED else given


def four_bits_or(operands: FourBitOperands, otherwise: Call) -> Tensor:
    """Return a product of a weight of four bits by a tuned kernel, or by `otherwise` where no row serves its M or that
    is faster.
    """
    return _four_bits(operands, otherwise)


def _read_four_bits(operands: FourBitOperands, otherwise: Call) -> FourBitOperands | None:
    x, weight, scale, order, *_ = operands
    dispatcher = default_dispatcher()
    if not dispatcher.packed_weights or not x.is_cuda:
        return None
    resolution = dispatcher.ask(FOUR_BIT_LAYER, FOUR_BIT_LAYER.check(operands)).resolution
    sizes = weight.shape[0], x.shape[-1]
    key = ("product", (x.numel() // sizes[1]).bit_length(), x.dtype, sizes, scale.shape, order, x.get_device())
    if resolution.kind in NOT_TUNED or not pays(key, lambda: (partial(linear_w4, *operands), otherwise)):
        return None
    return operands


_scaled: Final = _RacedProducts(SCALED, _read_scaled, copy_factors)
_four_bits: Final = _RacedProducts(FOUR_BIT_LAYER, _read_four_bits)


def activated_or(operands: ActivatedOperands, otherwise: Call) -> Tensor:
    """Return what a server makes of a product that it has, which a capture counts as one call of `linear_act`."""
    return otherwise()


def mixture_or(
    operands: MixtureOperands,
    otherwise: Callable[[MixtureOperands], Tensor],
    factor: float = 1.0,
    route: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Return a mixture of experts, times a factor, by tuned kernels.

    It is computed by `otherwise`, which may write to the tokens and knows the factor, where a product of both has no
    row of its M or that is faster. Both are timed on tokens that go to random experts, as the first call of a server
    is no real one. Where `otherwise` chooses the experts itself, `route` returns their weights and ids, for which the
    operands have memory alone; it is called, and timed, with the tuned kernels.
    """

    def compute_tuned(given: MixtureOperands) -> Tensor:
        if factor != 1.0:  # in float32, before a result is rounded
            given = given._replace(topk_weights=given.topk_weights * factor)
        more: dict[str, Any] = dict(zip(MixtureOperands._fields[8:], given[8:], strict=True))
        return fused_moe(*given[:8], **more)

    def compute_raced(given: MixtureOperands) -> Tensor:
        return compute_tuned(given if route is None else given._replace(topk_weights=route()[0]))

    def compute_routed(given: MixtureOperands) -> Tensor:
        return compute_tuned(given if route is None else with_routing(given, route))

    if not _holds(operands):
        return otherwise(operands)
    x, w1, ids = operands.x, operands.w1, operands.topk_ids
    sizes = (*w1.shape[:-1], x.shape[-1])
    key = ("mixture", ids.numel().bit_length(), x.dtype, sizes, w1.dtype, ids.shape[1], x.get_device())

    def prepare() -> tuple[Call, Call]:
        chosen = torch.rand(x.shape[0], w1.shape[0], device=x.device).topk(ids.shape[1]).indices
        spread = operands._replace(x=x.clone(), topk_ids=chosen.to(ids.dtype))
        return partial(compute_raced, spread), partial(otherwise, spread)

    return (compute_routed if pays(key, prepare) else otherwise)(operands)


def with_routing(operands: MixtureOperands, route: Callable[[], tuple[Tensor, Tensor]]) -> MixtureOperands:
    """Return operands with the weights and ids of the experts that `route` returns."""
    weights, ids = route()
    return operands._replace(topk_weights=weights, topk_ids=ids)


def _holds(operands: MixtureOperands) -> bool:
    """Return whether rows hold for both products at their M, not at another."""
    dispatcher, x, w1, w2 = default_dispatcher(), operands.x, operands.w1, operands.w2
    if not dispatcher.expert_weights or not x.is_cuda:
        return False
    factors = [None if one is None else (one.shape, one.dtype) for one in (operands.w1_scale, operands.w2_scale)]
    key = ("mixture", x.shape, x.dtype, w1.shape, w2.shape, w1.dtype, operands.topk_ids.shape, x.get_device(), *factors)
    table: dict[Any, Any] = dispatcher.calls.table
    known: bool | None = table.get(key)
    if known is None:
        try:
            found = [dispatcher.ask(*product).resolution for product in MIXTURE.products(operands)]
        except InputError:  # A server's operands may be of another kind altogether.
            return False
        known = all(_has_its_m(one, operands.topk_ids.numel()) for one in found)
        if all(one.lasting for one in found):
            keep(table, key, known)
    return known


def _has_its_m(resolution: Resolution, rows: int) -> bool:
    """Return whether a row has the M of a call; rows of captures have another spread over experts than any one call."""
    near, record = resolution.kind == "near", resolution.record
    return resolution.kind not in NOT_TUNED and not (near and (record is None or record.problem.group_m != rows))


def pays(key: tuple[Any, ...], prepare: Callable[[], tuple[Call, Call]]) -> bool:
    """Return whether tuned kernels are faster than the server's own.

    While a graph is captured nothing can be timed, and what was not timed before is not faster.

    Args:
        key: of the calls that share one answer, until records are added.
        prepare: gives a call by tuned kernels and the same by the server, which can be repeated.
    """
    table: dict[Any, Any] = default_dispatcher().calls.table
    known: bool | None = table.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _race(key, prepare)
        keep(table, key, known)
    return known


def _race(key: tuple[Any, ...], prepare: Callable[[], tuple[Call, Call]]) -> bool:
    kind, bits, _, shape, *_ = key
    try:
        both = prepare()
        in_graph = kind == "product" and 1 << bits <= MOST_ROWS_AT_ONCE
        tuned, own = (_seconds_in_graphs(both) if in_graph else None) or _seconds_by_events(both)
    except Exception as error:  # Too little memory, among others; the server runs without us, whatever it is.
        _LOG.warning("the server's own kernel is kept, as tuned ones can't be timed beside it: %s", error)
        return False
    faster = bool(tuned * _LEAST_GAIN < own)
    if settings.logs_choices():
        winner = "tuned kernels serve" if faster else "the server computes"
        which = "".join(" of no multiple of 4" if one else " of multiples of 4" for one in key if isinstance(one, bool))
        _LOG.info(
            "%s a %s of weights %s with M %d to %d%s: tuned %.1f us, the server's own %.1f us",
            winner, kind, tuple(shape), 1 << bits >> 1, (1 << bits) - 1, which, tuned * 1e6, own * 1e6,
        )  # fmt: skip
    return faster


def _seconds_by_events(calls: Sequence[Call]) -> list[float]:
    rounds = [[_seconds(call) for call in calls] for _ in range(1 + _ROUNDS)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _seconds_in_graphs(calls: Sequence[Call]) -> list[float] | None:
    """Return the GPU's times of calls between kernels of a graph; None where they can't be captured.

    Servers launch few rows so: kernels begin while those in front of them end. After a capture that failed nothing is
    captured any more, and nothing while another thread is at it, whose graph would have our kernels too.
    """
    if _failed or not _capturing.acquire(blocking=False):
        return None
    try:
        cached = torch.cuda.get_device_properties().L2_cache_size
        index, ours = torch.cuda.current_device(), torch.cuda.current_stream()
        cold = torch.zeros(cached // 2, dtype=torch.float32, device="cuda")  # twice as many bytes
        stream, pool, _ = _captures(index)
        stream.wait_stream(ours)
        try:
            with torch.cuda.stream(stream):
                graphs = [_capture(pool, cold.amax, call) for call in (lambda: None, *calls)]
                rounds = [[_seconds_of(graph) for graph in graphs] for _ in range(1 + _ROUNDS)][1:]
        finally:
            ours.wait_stream(stream)  # What failed may have left kernels there, which write where the next call does.
    except Exception as error:
        if not _failed:  # The call itself failed, as it would without a graph.
            raise
        _LOG.warning("products are timed without graphs from now on, as one can't be captured: %s", error)
        with suppress(Exception):
            _captures.__wrapped__(index)  # Until a capture ends, PyTorch may refuse random numbers outside of graphs.
        return None
    finally:
        _capturing.release()
    without, *times = (statistics.median(each) for each in zip(*rounds, strict=True))
    return [(seconds - without) / _CHAIN for seconds in times]


@functools.cache
def _captures(index: int) -> tuple[Any, Any, Any]:
    """Return a GPU's stream, its pool of memory for the graphs of races, and a graph that is kept for the pool's sake.

    PyTorch frees a pool with the last graph that uses it, and captures into it no more. One pool is for all, as graphs
    of one pool share the counters of our kernels.
    """
    stream, pool = torch.cuda.Stream(index), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        one = torch.zeros(1, device="cuda")
        return stream, pool, _capture(pool, one.neg, one.neg)


def _capture(pool: Any, before: Callable[..., Any], call: Callable[..., Any]) -> torch.cuda.CUDAGraph:
    """Return a graph on the current stream of some calls, something else before each."""
    call()
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for _ in range(_CHAIN):
                before()
                call()
        finally:
            graph.capture_end()
    except BaseException:
        _failed.append(graph)
        with suppress(Exception):  # The allocator would empty no cache any more; it refuses what has ended.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    return graph


def _seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _seconds(call: Call) -> float:
    """Return the GPU's time of a call, which is repeated behind more work where the host took longer than that."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cached = torch.cuda.get_device_properties().L2_cache_size
    for cycles in _BUSY_CYCLES:
        torch.empty(2 * cached, dtype=torch.uint8, device="cuda").zero_()
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
        waited = start.query()
        end.synchronize()
        if not waited:
            break
    return float(start.elapsed_time(end)) * 1e-3
