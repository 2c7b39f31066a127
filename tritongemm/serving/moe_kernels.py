"""The steps between the products of `fused_moe` by kernels: of a library, or compiled where the cache lacks them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tritongemm.build import expert_kernels
from tritongemm.build.expert_kernels import DEPTH, MX_MODES, Chosen, powers_of
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.operations import microscaling
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import moe_torch
from tritongemm.serving.calls import keep
from tritongemm.serving.fast_call import MISALIGNED_BITS
from tritongemm.serving.helper_kernels import HelperCall

if TYPE_CHECKING:
    from tritongemm.serving.device_kernels import DeviceKernels

_ID_TYPES = {torch.int32: "i32", torch.int64: "i64"}
_Pair: TypeAlias = "tuple[Tensor, Tensor | None]"


class MixtureSteps(Protocol):
    """What is done between the products of a mixture of experts; no step waits for the GPU."""

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows by expert: which one each place holds, where each went, and the place behind each expert's last."""

    def gather(self, x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> _Pair:
        """Each sorted row's token of x [tokens, K], in a type, with its factors where it is quantised."""

    def activate(self, h: Tensor, activation: str, mode: str, dtype: torch.dtype) -> _Pair:
        """The activation of the left half of h [rows, 2 K] times the right half, as `gather` gives rows."""

    def combine(self, y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weighted sum of each token's rows of y, in their order; rows of no expert count nothing."""


class MoeKernels:
    """The steps by a kernel each, in one thread; where there is none for a step, by PyTorch's operations.

    Args:
        device: the GPU, which is PyTorch's current device.
        table: what is ready in the thread.
    """

    def __init__(self, device: DeviceKernels, table: dict[Any, Any]) -> None:
        self._device, self._table = device, table

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `MixtureSteps.sort`."""
        count = ids.numel()
        order, place = (ids.new_empty(count, dtype=torch.int32) for _ in range(2))
        ends = ids.new_empty(experts, dtype=torch.int32)
        operands = {"ids": ids, "order": order, "place": place, "ends": ends}
        done = self._run(expert_kernels.choose_sort, (_ID_TYPES[ids.dtype], count, experts), operands)
        return (order, place, ends) if done else moe_torch.sort(ids, experts)

    def gather(self, x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> _Pair:
        """As `MixtureSteps.gather`."""
        x = _aligned(x)  # before its stride is told: a copy's rows are dense
        rows, k = order.numel(), x.shape[1]
        q, scale = _result(x, rows, k, mode, dtype)
        operands = {"x": x, "order": order.int(), "q": q, "scale": q if scale is None else scale}
        asked = DTYPE_NAMES[x.dtype], _name(dtype, mode), mode, rows, k, x.stride(0), topk
        done = self._run(expert_kernels.choose_gather, asked, operands)
        return (q, _as_taken(scale, mode)) if done else moe_torch.gather(x, order, topk, mode, dtype)

    def activate(self, h: Tensor, activation: str, mode: str, dtype: torch.dtype) -> _Pair:
        """As `MixtureSteps.activate`."""
        rows, k = h.shape[0], h.shape[1] // 2
        q, scale = _result(h, rows, k, mode, dtype)
        operands = {"h": h, "q": q, "scale": q if scale is None else scale}
        asked = DTYPE_NAMES[h.dtype], _name(dtype, mode), mode, rows, k, activation
        done = self._run(expert_kernels.choose_activate, asked, operands)
        return (q, _as_taken(scale, mode)) if done else moe_torch.activate(h, activation, mode, dtype)

    def combine(self, y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """As `MixtureSteps.combine`."""
        tokens, topk = weights.shape
        out = y.new_empty((tokens, y.shape[1]))
        if DTYPE_NAMES.get(weights.dtype) not in expert_kernels.WEIGHT_TYPES:
            weights = weights.float()
        operands = {"y": y, "place": place.int(), "weights": weights, "ends": ends, "out": out}
        asked = DTYPE_NAMES[y.dtype], DTYPE_NAMES[weights.dtype], tokens, y.shape[1], ends.numel(), topk
        done = self._run(expert_kernels.choose_combine, asked, operands)
        return out.to(dtype) if done else moe_torch.combine(y, place, ends, weights, dtype)

    def _run(self, choose: Callable[..., Chosen], asked: tuple[Any, ...], operands: dict[str, Tensor]) -> bool:
        """Whether a kernel did a step."""
        key = (choose, *asked)
        call: HelperCall | None = self._table[key] if key in self._table else self._make_ready(key, choose(*asked))
        if call is not None:
            call({name: _aligned(tensor) for name, tensor in operands.items()})
        return call is not None

    def _make_ready(self, key: tuple[Any, ...], chosen: Chosen) -> HelperCall | None:
        """What launches a kernel, kept in the thread's table; None where there is none, of which a warning tells once.

        While a graph is captured nothing is compiled or loaded, and nothing is kept that PyTorch does then.
        """
        call = None
        try:
            call = HelperCall(self._device.helpers.prepare(*chosen), self._device.device.index)
        except (TritonGemmError, OSError) as error:
            if torch.cuda.is_current_stream_capturing():
                return None
            warnings.warn(f"PyTorch's operations do a step of fused_moe, as no kernel does: {error}", stacklevel=5)
        keep(self._table, key, call)
        return call


def _result(near: Tensor, rows: int, k: int, mode: str, dtype: torch.dtype) -> _Pair:
    """Memory for rows and their factors."""
    if mode in MX_MODES:
        return microscaling.empty_pair((rows, k), dtype, powers_of(mode).layout, near.device)
    shapes = {"row": (rows,), "block": (cdiv(k, DEPTH), rows)}
    scale = near.new_empty(shapes[mode], dtype=torch.float32) if mode else None
    return near.new_empty((rows, k), dtype=dtype), scale


def _name(dtype: torch.dtype, mode: str) -> str:
    """Our name of the type of rows; with powers of two bytes are fp4."""
    return microscaling.FORMATS[dtype] if mode in MX_MODES else DTYPE_NAMES[dtype]


def _as_taken(scale: Tensor | None, mode: str) -> Tensor | None:
    return scale.mT if scale is not None and mode == "block" else scale


def _aligned(tensor: Tensor) -> Tensor:
    """A tensor at a multiple of 16 bytes; only a caller's own lies elsewhere, which kernels do not write."""
    return tensor.clone() if tensor.data_ptr() & MISALIGNED_BITS else tensor
