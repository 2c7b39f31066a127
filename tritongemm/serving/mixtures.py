"""The public function `fused_moe`, with the steps between its products by kernels: of a library, or compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from tritongemm.build import expert_kernels
from tritongemm.build.expert_kernels import Chosen
from tritongemm.build.few_expert_kernels import MOST_ROWS, SCALES, FewExperts, choose_down, choose_gate_up
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import PLAIN
from tritongemm.core.record import Record
from tritongemm.core.scaling import MX_MODES
from tritongemm.operations import microscaling, mixture_steps
from tritongemm.operations.checks import is_wrapped, wants_gradient
from tritongemm.operations.contract import ProductOperation
from tritongemm.operations.mixture import MIXTURE, CheckedMixture, MixtureOperands, biases, down, gate_up, rows_type
from tritongemm.operations.mixture_steps import ExpertBias, MixtureSteps, Rows, as_taken, empty_rows, parts_of
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.calls import NOT_TUNED, keep
from tritongemm.serving.device_kernels import HelperCall, HelperKernels
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.launching import MISALIGNED_BITS
from tritongemm.serving.products import run_grouped
from tritongemm.serving.traced_operations import define

T = TypeVar("T")

_ID_TYPES = {torch.int32: "i32", torch.int64: "i64"}
_LEAST_STEP: Final = 2e-6  # Seconds that an activation by itself takes in a graph, at least.


def fused_moe(  # noqa: PLR0913 (what a mixture has)
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    *,
    scale_layout: str = "",
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    keep_activations: bool = False,
    order: str = PLAIN,
) -> Tensor:
    """Compute a mixture-of-experts layer: each token's weighted sum over its experts of w2 @ (activation(gate) * up).

    w1 gives gate and up. For inference. Tokens are sorted by expert on the GPU without synchronising, so the call can
    be captured in a graph. The two products are those of `grouped_mm`, with tuned kernels where a record has them. With
    fp8, int8 or fp4 weights the gathered tokens and the activated values are quantised to the weights' type, with
    factors of the same granularity: per row, per 128 elements along K (fp8), or a power of two per 32 (fp8, fp4).
    Beside weights of four bits as `linear_w4` takes them they stay in x's type.

    Args:
        x: [tokens, hidden] of bfloat16 or float16, or float32 on a CPU.
        w1: [experts, 2 * inner, hidden]: the gate's rows, then those of up. For fp4 bytes with two numbers each along
            K.
        w2: [experts, hidden, inner], likewise.
        topk_weights: [tokens, k], the routing weights.
        topk_ids: int32 or int64 [tokens, k], the expert ids; an id out of range, e.g. of an expert on another rank,
            contributes nothing.
        activation: ``silu``, ``gelu`` or ``clamped_swiglu`` (gpt-oss's, clamped at 7).
        w1_scale: None; float32 [experts, 2 * inner], for fp8 and int8, or [experts, 2 * inner / 128, hidden / 128], for
            fp8; or powers of two (e8m0) [experts, 2 * inner, hidden / 32], for OCP's fp8 and fp4.
            Of int4 [experts, hidden / 128, 2 * inner] (or 64, 32) in x's type, with zero points [experts, hidden / 128,
            2, 2 * inner].
        w2_scale: None; float32 [experts, hidden], or [experts, hidden / 128, inner / 128]; or e8m0 [experts, hidden,
            inner / 32]; of int4 likewise.
        scale_layout: "" for powers of two in rows, or a plug-in of numerics/scale_layouts that gives the layout of each
            expert's factors, padded.
        w1_bias: [experts, 2 * inner] or None.
        w2_bias: [experts, hidden] or None.
        keep_activations: whether activations beside fp4 stay in x's type (mxfp4, as gpt-oss), rather than fp4 too.
        order: memory layout of weights of four bits, as of `linear_w4`.

    Returns:
        [tokens, hidden] of x's type, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, types or devices that do not fit together.
        DriverError: the driver refused a launch.

    Examples:
        >>> x, w1, w2 = torch.randn(4, 64), torch.randn(3, 2 * 16, 64), torch.randn(3, 64, 16)
        >>> weights, ids = torch.ones(4, 1), torch.tensor([[0], [2], [1], [0]], dtype=torch.int32)
        >>> tritongemm.fused_moe(x, w1, w2, weights, ids).shape
        torch.Size([4, 64])
    """
    given = (
        x, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, scale_layout, w1_bias, w2_bias,
        keep_activations, order,
    )  # fmt: skip
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(*given)
        return result
    return _run(*given)


def _run(*given: Any) -> Tensor:
    checked = MIXTURE.check(MixtureOperands(*given))
    x = checked.given.x
    if not x.is_cuda or torch.cuda.current_device() == x.get_device():
        return _compute(checked)
    with torch.cuda.device(x.get_device()):
        return _compute(checked)


def _compute(checked: CheckedMixture) -> Tensor:
    """Return the result on the current device. Factors of rows that this package quantised are not looked at."""
    steps = steps_for(*checked.given)
    if not isinstance(steps, MoeKernels):
        return MIXTURE.fallback(checked)
    few = steps.compute_few(checked)
    return few if few is not None else steps.compute(checked)


_trace = define(MIXTURE, _run)


def steps_for(*given: Any) -> MixtureSteps:
    """Select what computes the steps between the products: kernels on a GPU, PyTorch if a gradient is needed."""
    tensors = [one for one in given if isinstance(one, Tensor)]
    if wants_gradient(*tensors) or any(map(is_wrapped, tensors)) or not tensors[0].is_cuda:
        return mixture_steps
    dispatcher = default_dispatcher()
    device = dispatcher.device(tensors[0].get_device())
    return mixture_steps if device is None else MoeKernels(device.helpers, dispatcher.calls.table)


def list_products(checked: CheckedMixture) -> Iterator[tuple[ProductOperation, Any]]:
    """Yield the two products of a mixture, the first with its activation where rows say that one kernel is faster."""
    first, second = MIXTURE.products(checked.given)
    steps = steps_for(*checked.given)
    activates = isinstance(steps, MoeKernels) and steps.act_of(checked)
    yield next(MIXTURE.first_products(checked)) if activates else first
    yield second


class MoeKernels:
    """The steps by a kernel each, in one thread; where there is none for a step, by PyTorch's operations."""

    def __init__(self, helpers: HelperKernels, table: dict[Any, Any]) -> None:
        self._helpers, self._table = helpers, table

    def compute(self, checked: CheckedMixture) -> Tensor:
        """Return the result by two grouped products, the first with its activation where rows say so."""
        given, mode = checked
        x, ids, weights = given.x, given.topk_ids.contiguous(), given.topk_weights.contiguous()
        if not x.shape[0]:
            return MIXTURE.infer(given)
        given, act = given._replace(topk_ids=ids), self.act_of(checked)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, (order, place, ends) = self.route(x, ids, given.w1.shape[0], mode, rows_type(given, given.w1))
        of_w1, of_w2 = biases(given, order)
        h = run_grouped(*gate_up(given, rows, ends, act))
        if act:
            inner = parts_of(h, ids.numel(), mode)
        else:
            inner = self.activate(h, given.activation, mode, rows_type(given, given.w2), of_w1)
        y = run_grouped(*down(given, inner, ends))
        return self.combine(y, place, ends, weights, x.dtype, of_w2)

    def compute_few(self, checked: CheckedMixture) -> Tensor | None:
        """Return the result by two kernels, in which each row of a token is multiplied by its expert's weights alone.

        Returns:
            None where the rows of both products do not say that this is fastest, or there are no such kernels.
        """
        given, mode = checked
        x, w1, w2, weights, ids = given[:5]
        (tokens, topk), (experts, _, hidden), inner = ids.shape, w1.shape, w2.shape[2]
        if not (tokens and self._rows_are_alone(checked)):
            return None
        x, ids, weights = _aligned(x if x.stride(1) == 1 else x.contiguous()), ids.contiguous(), weights.contiguous()
        h, out = x.new_empty((tokens * topk, inner)), x.new_empty((tokens, hidden))
        scales = [x if one is None else one.contiguous() for one in (given.w1_scale, given.w2_scale)]
        kind = _ID_TYPES[ids.dtype], DTYPE_NAMES[x.dtype], DTYPE_NAMES[w1.dtype], mode
        first = FewExperts(*kind, tokens * topk, inner, hidden, topk, experts)
        operands = {"ids": ids, "x": x, "w": w1, "scale": scales[0], "h": h}
        if not self._run(choose_gate_up, (first, x.stride(0), given.activation), operands):
            return None
        second = FewExperts(*kind, tokens, hidden, inner, topk, experts)
        operands = {"ids": ids, "h": h, "w": w2, "scale": scales[1], "weights": weights, "out": out}
        return out if self._run(choose_down, (second, DTYPE_NAMES[weights.dtype]), operands) else None

    def _rows_are_alone(self, checked: CheckedMixture) -> bool:
        """Return whether both products have tuned kernels, one of which has one row of A a program.

        The other product's is little slower so, and three kernels less make up for that.
        """

        def decide(tuned: list[Record]) -> bool:
            return len(tuned) == 2 and any(one.config.block_m == 1 for one in tuned) and _is_for_few(checked)

        return self._decided("few", checked, MIXTURE.products(checked.given), decide)

    def act_of(self, checked: CheckedMixture) -> str:
        """Return the epilogue of the first product where rows say that with it one kernel is faster than two steps."""

        def decide(tuned: list[Record]) -> str:
            both = [one.served_seconds for one in tuned]
            faster = len(both) == 2 and both[0] < both[1] + _LEAST_STEP
            return tuned[0].problem.epilogue if faster and not default_dispatcher().wants_invariant_rows else ""

        return self._decided("act", checked, MIXTURE.first_products(checked), decide)

    def _decided(
        self, name: str, checked: CheckedMixture, products: Iterable[tuple[ProductOperation, Any]],
        decide: Callable[[list[Record]], T],
    ) -> T:  # fmt: skip
        """Return what the tuned rows of products say of such a mixture, which is asked once."""
        given = checked.given
        shapes = given.x.shape, given.w1.shape, given.topk_ids.shape
        kinds = given.x.dtype, given.w1.dtype, given.topk_weights.dtype, checked.mode, given.w1_bias is None
        key = (name, given.x.get_device(), given.activation, *shapes, *kinds)
        if key in self._table:
            return cast("T", self._table[key])
        found = [default_dispatcher().ask(*product).resolution for product in products]
        decided = decide([one.record for one in found if one.kind not in NOT_TUNED and one.record is not None])
        if all(one.lasting for one in found):
            keep(self._table, key, decided)
        return decided

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort as `MixtureSteps.sort`."""
        made = _empty_order(ids, experts)
        asked = _ID_TYPES[ids.dtype], ids.numel(), experts
        done = self._run(expert_kernels.choose_sort, asked, {"ids": ids, **made})
        return (made["order"], made["place"], made["ends"]) if done else mixture_steps.sort(ids, experts)

    def gather(self, x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> Rows:
        """Gather as `MixtureSteps.gather`."""
        x = _aligned(x)  # before its stride is read: a copy's rows are dense
        rows, k = order.numel(), x.shape[1]
        q, scale = empty_rows(x, rows, k, mode, dtype)
        operands = {"x": x, "order": order.int(), "q": q, "scale": q if scale is None else scale}
        asked = DTYPE_NAMES[x.dtype], _name(dtype, mode), mode, rows, k, x.stride(0), topk
        done = self._run(expert_kernels.choose_gather, asked, operands)
        return (q, as_taken(scale, mode)) if done else mixture_steps.gather(x, order, topk, mode, dtype)

    def route(
        self, x: Tensor, ids: Tensor, experts: int, mode: str, dtype: torch.dtype
    ) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        """Route as `MixtureSteps.route`, of a few rows by one kernel."""
        x, shape, topk = _aligned(x), (ids.numel(), x.shape[1]), ids.shape[1]
        if shape[0] <= expert_kernels.MOST_ROUTED:
            q, scale = empty_rows(x, *shape, mode, dtype)
            made = _empty_order(ids, experts)
            operands = {"ids": ids, "x": x, **made, "q": q, "scale": q if scale is None else scale}
            types = _ID_TYPES[ids.dtype], DTYPE_NAMES[x.dtype], _name(dtype, mode)
            if self._run(expert_kernels.choose_route, (*types, mode, shape, x.stride(0), topk, experts), operands):
                return (q, as_taken(scale, mode)), (made["order"], made["place"], made["ends"])
        found = self.sort(ids, experts)
        return self.gather(x, found[0], topk, mode, dtype), found

    def activate(
        self, h: Tensor, activation: str, mode: str, dtype: torch.dtype, bias: ExpertBias | None = None, run: int = 0,
        into: Rows | None = None,
    ) -> Rows:  # fmt: skip
        """Activate as `MixtureSteps.activate`."""
        rows, k = h.shape[0], h.shape[1] // 2
        q, scale = into or empty_rows(h, rows, k, mode, dtype)
        added, more = _added(bias, h)
        order = h if bias is None else bias.order.int()
        operands = {"h": h, "q": q, "scale": q if scale is None else scale, **more, "order": order}
        asked = DTYPE_NAMES[h.dtype], _name(dtype, mode), mode, rows, k, activation, added, run
        done = self._run(expert_kernels.choose_activate, asked, operands)
        return (q, as_taken(scale, mode)) if done else mixture_steps.activate(h, activation, mode, dtype, bias, run)

    def combine(
        self, y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype,
        bias: ExpertBias | None = None,
    ) -> Tensor:  # fmt: skip
        """Combine as `MixtureSteps.combine`."""
        tokens, topk = weights.shape
        out = y.new_empty((tokens, y.shape[1]))
        if DTYPE_NAMES.get(weights.dtype) not in expert_kernels.WEIGHT_TYPES:
            weights = weights.float()
        operands = {"y": y, "place": place.int(), "weights": weights, "ends": ends, "out": out}
        added, more = _added(bias, y)
        operands |= more
        asked = DTYPE_NAMES[y.dtype], DTYPE_NAMES[weights.dtype], tokens, y.shape[1], ends.numel(), topk, added
        done = self._run(expert_kernels.choose_combine, asked, operands)
        return out.to(dtype) if done else mixture_steps.combine(y, place, ends, weights, dtype, bias)

    def _run(self, choose: Callable[..., Chosen], asked: tuple[Any, ...], operands: dict[str, Tensor]) -> bool:
        """Return whether a kernel did a step."""
        key = (choose, self._helpers.device.index, *asked)
        call: HelperCall | None = self._table[key] if key in self._table else self._make_ready(key, choose(*asked))
        if call is not None:
            call({name: _aligned(tensor) for name, tensor in operands.items()})
        return call is not None

    def _make_ready(self, key: tuple[Any, ...], chosen: Chosen) -> HelperCall | None:
        """Return a prepared kernel, kept in the thread's table; None where there is none, with one warning.

        While a graph is captured nothing is compiled or loaded, and nothing is kept that PyTorch does then.
        """
        call = None
        try:
            call = HelperCall(self._helpers.prepare(*chosen), self._helpers.device.index)
        except (TritonGemmError, OSError) as error:
            if torch.cuda.is_current_stream_capturing():
                return None
            warnings.warn(f"PyTorch's operations do a step beside products, as no kernel does: {error}", stacklevel=5)
        keep(self._table, key, call)
        return call


def _is_for_few(checked: CheckedMixture) -> bool:
    """Return whether the two kernels for few tokens read such operands."""
    given, mode = checked
    is_plain = given.w1_bias is None and given.w2_bias is None and not given.is_of_four_bits and mode in SCALES
    is_plain &= given.topk_ids.numel() <= MOST_ROWS
    fits = given.topk_ids.shape[1] <= expert_kernels.MOST_TOPK and given.w1.is_contiguous() and given.w2.is_contiguous()
    return is_plain and fits and DTYPE_NAMES.get(given.topk_weights.dtype) in expert_kernels.WEIGHT_TYPES


def _empty_order(ids: Tensor, experts: int) -> dict[str, Tensor]:
    """Return the memory for what `MixtureSteps.sort` returns."""
    lengths = {"order": ids.numel(), "place": ids.numel(), "ends": experts}
    return {name: ids.new_empty(length, dtype=torch.int32) for name, length in lengths.items()}


def _added(bias: ExpertBias | None, near: Tensor) -> tuple[expert_kernels.Added, dict[str, Tensor]]:
    """Return what a kernel must know of a bias, and its operands; without one some tensor, which it does not read."""
    if bias is None:
        return expert_kernels.UNBIASED, {"bias": near, "ids": near}
    types = DTYPE_NAMES[bias.values.dtype], _ID_TYPES[bias.ids.dtype]
    return (*types, bias.values.shape[0]), {"bias": bias.values.contiguous(), "ids": bias.ids}


def _name(dtype: torch.dtype, mode: str) -> str:
    """Return our name of the type of rows; with powers of two bytes are fp4."""
    return microscaling.FORMATS[dtype] if mode in MX_MODES else DTYPE_NAMES[dtype]


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor at a multiple of 16 bytes; only a caller's own may be elsewhere, which kernels do not write."""
    return tensor.clone() if tensor.data_ptr() & MISALIGNED_BITS else tensor
