"""Products and mixtures of a server, which tuned kernels compute where a row has their M, and else the server itself.

A capture puts functions in the places of these two that count what a server asks for, whatever computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.serving.calls import NOT_TUNED, keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.layer_choice import BlockOperands, compute, find_layout
from tritongemm.serving.mixtures import fused_moe

_NOT_AT_THIS_M: Final = (*NOT_TUNED, "near")


def product_or(operands: BlockOperands, otherwise: Callable[[], Tensor]) -> Tensor:
    """Return a product with scales by a tuned kernel, or by `otherwise` where no row has its M."""
    layout = find_layout(operands, near=False)
    return otherwise() if layout is None else compute(operands, layout)


def mixture_or(operands: MixtureOperands, otherwise: Callable[[], Tensor]) -> Tensor:
    """Return a mixture of experts by tuned kernels, or by `otherwise` where a product of both has no row of its M."""
    return fused_moe(*operands[:8]) if _holds(operands) else otherwise()


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
        known = all(one.kind not in _NOT_AT_THIS_M for one in found)
        if all(one.lasting for one in found):
            keep(table, key, known)
    return known
