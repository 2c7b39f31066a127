"""Products and mixtures of a server, which tuned kernels compute where a row has their M, and else the server itself.

A capture puts functions in the places of both that count what a server asks for, whatever computes it.

Rows were raced against PyTorch's product, and a server may have a faster one. So both are timed at the first call of
a kind. GPU time alone counts: the GPU is kept busy while the host launches a call, and its cache holds none of the
operands, as between the layers of a model.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.problem import PLAIN
from tritongemm.core.served_call import Resolution
from tritongemm.operations.linear_act import ActivatedOperands
from tritongemm.operations.linear_w4 import FOUR_BIT_LAYER, FourBitOperands
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.serving.added_operations import linear_w4
from tritongemm.serving.calls import NOT_TUNED, keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.linear_fp8 import BlockOperands, compute, find_layout
from tritongemm.serving.mixtures import fused_moe
from tritongemm.system import settings

Call: TypeAlias = Callable[[], Tensor]

_LOG = logging.getLogger("tritongemm")
_ROUNDS: Final = 5  # after one that loads and compiles
_LEAST_GAIN: Final = 1.03  # A mixture that won such a race by 1.6 % was 3.5 % slower in a real model.
_BUSY_CYCLES: Final = tuple(2_000_000 << more for more in range(6))  # from about 1 ms to 32 ms


def product_or(operands: BlockOperands, otherwise: Callable[[], Tensor]) -> Tensor:
    """Return a product with scales by a tuned kernel, or by `otherwise` where no row has its M or that is faster.

    Where rows must be invariant, a kernel of the rows' order serves at every M, and nothing is timed.
    """
    x, weight, weight_scale, x_scale, bias, out_dtype = operands
    dispatcher, ready_key = default_dispatcher(), None
    if x_scale is not None:  # what is multiplied as it is has one launch, found by one look
        ready_key = (
            "ready", x.shape, x.stride(), x.dtype, x.get_device(), weight.shape, weight.stride(), weight.dtype,
            weight.get_device(), x_scale.shape, x_scale.stride(), x_scale.dtype, weight_scale.shape,
            weight_scale.stride(), weight_scale.dtype, out_dtype,
            None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        )  # fmt: skip
        ready: Any = dispatcher.calls.table.get(ready_key)
        if ready is not None:
            product: Tensor = ready(x, weight, x_scale, weight_scale, bias, out_dtype, PLAIN, "")
            return product
    invariant = dispatcher.wants_invariant_rows
    layout = find_layout(operands, near=invariant)
    if layout is None:
        if invariant:  # as may be while a graph is captured
            size = f"{tuple(x.shape)} by {tuple(weight.shape)}"
            warnings.warn(f"{size}: no kernel of the rows' order serves, so the server computes it", stacklevel=2)
        return otherwise()
    rows = x.numel() // x.shape[-1]
    key = ("product", rows.bit_length(), x.dtype, weight.shape, operands.weight_scale.shape, layout, x.get_device())
    ours = partial(compute, operands, layout)
    if not invariant and not pays(key, lambda: (ours, otherwise)):
        return otherwise()
    if ready_key is not None and x_scale is not None:
        given = ScaledOperands(x, weight, x_scale, weight_scale, bias, out_dtype)
        dispatcher.resolve(SCALED, ready_key, given)
    return ours()


def four_bits_or(operands: FourBitOperands, otherwise: Call) -> Tensor:
    """Return a product of a weight of four bits by a tuned kernel, or by `otherwise` where no row serves its M or that
    is faster.
    """
    x, weight, scale, order, bias, *_ = operands
    dispatcher = default_dispatcher()
    kind = x.dtype, (weight.shape[0], x.shape[-1]), scale.shape, order, x.get_device()
    key = ("four bits", x.shape, bias is None, *kind)
    table: dict[Any, Any] = dispatcher.calls.table
    known: bool | None = table.get(key)
    if known is None:
        if not dispatcher.packed_weights or not x.is_cuda:
            return otherwise()
        resolution = dispatcher.ask(FOUR_BIT_LAYER, FOUR_BIT_LAYER.check(operands)).resolution
        known = resolution.kind not in NOT_TUNED
        if resolution.lasting:
            keep(table, key, known)
    ours = partial(linear_w4, *operands[:5])
    of_race = ("product", (x.numel() // x.shape[-1]).bit_length(), x.dtype, *kind[1:])
    return (ours if known and pays(of_race, lambda: (ours, otherwise)) else otherwise)()


def activated_or(operands: ActivatedOperands, otherwise: Call) -> Tensor:
    """Return what a server makes of a product that it has, which a capture counts as one call of `linear_act`."""
    return otherwise()


def mixture_or(
    operands: MixtureOperands,
    otherwise: Callable[[MixtureOperands], Tensor],
    factor: float = 1.0,
    route: Callable[[], object] | None = None,
) -> Tensor:
    """Return a mixture of experts, times a factor, by tuned kernels.

    It is computed by `otherwise`, which may write to the tokens and knows the factor, where a product of both has no
    row of its M or that is faster. Both are timed on tokens that go to random experts, as the first call of a server
    is no real one; what gave the operands their experts, where `otherwise` does that itself, is `route`, timed too.
    """

    def compute_tuned(given: MixtureOperands) -> Tensor:
        if factor != 1.0:  # in float32, before a result is rounded
            given = given._replace(topk_weights=given.topk_weights * factor)
        more: dict[str, Any] = dict(zip(MixtureOperands._fields[8:], given[8:], strict=True))
        return fused_moe(*given[:8], **more)

    def compute_raced(given: MixtureOperands) -> Tensor:
        if route is not None:
            route()
        return compute_tuned(given)

    if not _holds(operands):
        return otherwise(operands)
    x, w1, ids = operands.x, operands.w1, operands.topk_ids
    sizes = (*w1.shape[:-1], x.shape[-1])
    key = ("mixture", ids.numel().bit_length(), x.dtype, sizes, w1.dtype, ids.shape[1], x.get_device())

    def prepare() -> tuple[Call, Call]:
        chosen = torch.rand(x.shape[0], w1.shape[0], device=x.device).topk(ids.shape[1]).indices
        spread = operands._replace(x=x.clone(), topk_ids=chosen.to(ids.dtype))
        return partial(compute_raced, spread), partial(otherwise, spread)

    return (compute_tuned if pays(key, prepare) else otherwise)(operands)


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
    try:
        ours, theirs = prepare()
        rounds = [(_seconds(ours), _seconds(theirs)) for _ in range(1 + _ROUNDS)][1:]
    except (RuntimeError, TritonGemmError) as error:  # too little memory, among others
        _LOG.warning("the server's own kernel is kept, as tuned ones can't be timed beside it: %s", error)
        return False
    tuned, own = (statistics.median(times) for times in zip(*rounds, strict=True))
    faster = bool(tuned * _LEAST_GAIN < own)
    if settings.logs_choices():
        kind, bits, _, shape, *_ = key
        winner = "tuned kernels serve" if faster else "the server computes"
        _LOG.info(
            "%s a %s of weights %s with M %d to %d: tuned %.1f us, the server's own %.1f us",
            winner, kind, tuple(shape), 1 << bits >> 1, (1 << bits) - 1, tuned * 1e6, own * 1e6,
        )  # fmt: skip
    return faster


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
