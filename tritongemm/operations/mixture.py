"""The operation `fused_moe`: a layer of a mixture of experts, which has two grouped products."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.core.helper_kernel import ACTIVATIONS
from tritongemm.core.problem import PLAIN
from tritongemm.core.scaling import MX_MODES, SCALED_BLOCK, granularity, powers_of
from tritongemm.operations import mixture_steps
from tritongemm.operations.checks import SCALED_RESULTS, check_fit, check_tensors, check_unmapped, check_values
from tritongemm.operations.contract import Operation, ProductOperation
from tritongemm.operations.factors import EXPONENTS, of_groups
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands, check_factors
from tritongemm.operations.microscaling import FORMATS, packed
from tritongemm.operations.mixture_steps import ExpertBias, Rows, as_taken, empty_rows

_GATED = {"silu": "silu_mul", "gelu": "gelu_mul"}  # epilogues of activations


class MixtureOperands(NamedTuple):
    """The arguments of `fused_moe`."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: str = "silu"
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    scale_layout: str = ""
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    keep_activations: bool = False
    order: str = PLAIN

    @property
    def is_of_four_bits(self) -> bool:
        """Whether weights of four bits are multiplied by activations as they are."""
        scale = self.w1_scale
        powers = isinstance(scale, Tensor) and scale.dtype in EXPONENTS
        is_packed = isinstance(scale, Tensor) and self.w1.dtype == torch.uint8
        return is_packed and (self.keep_activations or not powers)


class CheckedMixture(NamedTuple):
    """Operands of `fused_moe`, and how rows are quantised: ``row``, ``block``, one of `MX_MODES`, or "" for not."""

    given: MixtureOperands
    mode: str


class Mixture(Operation):
    """Each token's weighted sum over its experts of w2 @ (activation(gate) * up)."""

    schema = (
        "fused_moe(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, "
        "Tensor? w1_scale, Tensor? w2_scale, str scale_layout='', Tensor? w1_bias=None, Tensor? w2_bias=None, "
        "bool keep_activations=False, str order='plain') -> Tensor"
    )
    operands = MixtureOperands

    def check(self, given: MixtureOperands) -> CheckedMixture:
        """Return the operands, which belong together; factors on a CPU are looked at."""
        _check_operands(*given[:6])
        _check_biases(given)
        if given.is_of_four_bits:
            check_tensors({"w1_scale": given.w1_scale, "w2_scale": given.w2_scale})
            return CheckedMixture(given, "")
        if given.keep_activations or given.order != PLAIN:
            raise InputError("keep_activations and order are for weights of four bits (uint8) with scale factors")
        return CheckedMixture(given, _mode(*given[:3], given.w1_scale, given.w2_scale, given.scale_layout))

    def infer(self, given: MixtureOperands) -> Tensor:
        """Return a result without contents."""
        _check_extents(given.x, given.w1, given.w2)
        return given.x.new_empty((given.x.shape[0], given.w2.shape[1]))

    def first_products(self, checked: CheckedMixture) -> Iterator[tuple[ProductOperation, GroupedOperands]]:
        """Yield gate and up of each expert with their activation, then without; none where that is no one kernel."""
        given, mode = checked
        is_plain = given.w1_bias is None and not given.is_of_four_bits and mode in ("", "block")
        if is_plain and given.activation in _GATED:
            operation, product = next(self.products(given))
            yield operation, product._replace(act=_GATED[given.activation] + ("_block" if mode else ""))
            yield operation, product

    def products(self, given: MixtureOperands) -> Iterator[tuple[ProductOperation, Any]]:
        """Yield gate and up of each expert, then down, over the rows of all tokens."""
        checked = self.check(given)
        rows = given.topk_ids.numel()
        for w, scale in ((given.w1, given.w1_scale), (given.w2, given.w2_scale)):
            q, of_q = empty_rows(given.x, rows, w.shape[2] * packed(w), checked.mode, rows_type(given, w))
            ends = given.topk_ids.new_empty(w.shape[0], dtype=torch.int32)
            yield GROUPED, GroupedOperands(q, w.mT, ends, as_taken(of_q, checked.mode), scale, *_rest(given))

    def fallback(self, checked: CheckedMixture) -> Tensor:
        """Return the result of PyTorch's steps and products."""
        given, mode = checked
        if not given.x.shape[0]:
            return self.infer(given)
        ids, experts = given.topk_ids, given.w1.shape[0]
        rows, (order, place, ends) = mixture_steps.route(given.x, ids, experts, mode, rows_type(given, given.w1))
        of_w1, of_w2 = biases(given, order)
        h = GROUPED.fallback(GROUPED.check(gate_up(given, rows, ends)))
        inner = mixture_steps.activate(h, given.activation, mode, rows_type(given, given.w2), of_w1)
        y = GROUPED.fallback(GROUPED.check(down(given, inner, ends)))
        return mixture_steps.combine(y, place, ends, given.topk_weights, given.x.dtype, of_w2)


MIXTURE = Mixture()


def gate_up(given: MixtureOperands, rows: Rows, ends: Tensor, act: str = "") -> GroupedOperands:
    """Return the operands of the first product, of rows that end where each expert's do; `act` is its epilogue."""
    return GroupedOperands(rows[0], given.w1.mT, ends, rows[1], given.w1_scale, *_rest(given), act)


def down(given: MixtureOperands, inner: Rows, ends: Tensor) -> GroupedOperands:
    """Return the operands of the second product."""
    return GroupedOperands(inner[0], given.w2.mT, ends, inner[1], given.w2_scale, *_rest(given))


def biases(given: MixtureOperands, order: Tensor) -> tuple[ExpertBias | None, ExpertBias | None]:
    """Return what is added to the rows of both products, which stand in an order."""
    both = (given.w1_bias, given.w2_bias)
    first, second = (None if one is None else ExpertBias(one, given.topk_ids, order) for one in both)
    return first, second


def _rest(given: MixtureOperands) -> tuple[torch.dtype, str, str]:
    return given.x.dtype, given.scale_layout, given.order


def rows_type(given: MixtureOperands, w: Tensor) -> torch.dtype:
    """Return the type of rows that are multiplied by weights: theirs, or that of activations beside four bits."""
    return given.x.dtype if given.is_of_four_bits else w.dtype


def _check_biases(given: MixtureOperands) -> None:
    """Refuse biases that have no row of the right length for each expert."""
    for name, bias, w in (("w1_bias", given.w1_bias, given.w1), ("w2_bias", given.w2_bias, given.w2)):
        if bias is None:
            continue
        check_tensors({"x": given.x, name: bias})
        if tuple(bias.shape) != tuple(w.shape[:2]) or bias.dtype not in SCALED_RESULTS:
            wanted = f"of {tuple(w.shape[:2])} floats, a row for each expert"
            raise InputError(f"{name} is {bias.dtype} {tuple(bias.shape)}; it is {wanted}")


def _check_operands(x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str) -> None:
    """Refuse what does not belong together."""
    operands = {"x": x, "w1": w1, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    check_tensors(operands)
    check_unmapped("fused_moe", operands)
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; there are: {', '.join(ACTIVATIONS)}")
    if x.dtype not in SCALED_RESULTS:
        raise InputError(f"x must be bfloat16 or float16, or float32 on a CPU, not {x.dtype}")
    _check_extents(x, w1, w2)
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        shapes = f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}"
        raise InputError(f"{shapes} must be [{x.shape[0]}, experts of a token]")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise InputError(f"topk_weights must be floats, not {topk_weights.dtype}")
    if not w1.numel():
        raise InputError(f"w1 {tuple(w1.shape)} is empty: there is nothing to multiply by")
    if not topk_ids.shape[1]:
        raise InputError(f"a token can't go to {topk_ids.shape[1]} of {w1.shape[0]} experts")


def _check_extents(x: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Refuse tokens and weights whose shapes do not belong together."""
    each = packed(w1)
    fit = x.dim() == 2 and w1.dim() == w2.dim() == 3 and x.shape[1] == w1.shape[2] * each
    halves = ", of fp4 with two numbers a byte along K" if each > 1 else ""
    wanted = f"[tokens, hidden], [experts, 2 * inner, hidden] and [experts, hidden, inner]{halves}"
    check_fit(fit, wanted, x=x, w1=w1, w2=w2)
    (experts, both, _), hidden = w1.shape, x.shape[1]
    if both % (2 * each) or tuple(w2.shape) != (experts, hidden, both // 2 // each):
        right = experts, hidden, both // 2 // each
        raise InputError(f"w1 {tuple(w1.shape)} wants a w2 {right}, not {tuple(w2.shape)}")


def _mode(
    x: Tensor, w1: Tensor, w2: Tensor, w1_scale: Tensor | None, w2_scale: Tensor | None, scale_layout: str
) -> str:
    """Return how rows are quantised: ``row``, ``block``, one of `MX_MODES`, or "" for not at all."""
    if w1.dtype != w2.dtype or (w1_scale is None) != (w2_scale is None):
        raise InputError("w1 and w2 must be of one type, both with scale factors or both without")
    if w1_scale is not None:
        check_tensors({"x": x, "w1_scale": w1_scale, "w2_scale": w2_scale})
    if scale_layout and (w1_scale is None or w1_scale.dtype not in EXPONENTS):
        raise InputError(f"scale_layout is {scale_layout!r}; it is of factors that are powers of two (e8m0)")
    if w1_scale is None or w2_scale is None:
        if w1.dtype != x.dtype:
            raise InputError(f"x is {x.dtype}, w1 is {w1.dtype}: without scale factors they are of one type")
        return ""
    powers = w1_scale.dtype in EXPONENTS
    if powers:
        _check_powers(w1, scale_layout)
    else:
        _check_floats(w1, w1_scale)
    scaling = of_groups(w1_scale, scale_layout)
    mode = granularity(scaling)
    if mode == "block" and (w1.shape[2] % SCALED_BLOCK or w2.shape[2] % SCALED_BLOCK):
        extents = f"hidden {w1.shape[2]} and inner {w2.shape[2]}"
        raise InputError(f"{extents} must be multiples of {SCALED_BLOCK}, a block's depth")
    for name, scale, w in (("w1_scale", w1_scale, w1), ("w2_scale", w2_scale, w2)):
        experts, rows, depth = w.shape
        assert scaling[1] is not None
        check_factors(name, scale, scaling[1], (experts,), (rows, depth * packed(w)))
    check_values(w1_scale=w1_scale, w2_scale=w2_scale)
    return mode


def _check_floats(w1: Tensor, w1_scale: Tensor) -> None:
    """Refuse weights that have no factors in float32, and factors of blocks where there are those of rows alone."""
    if w1.dtype != torch.int8 and (w1.element_size() != 1 or not w1.dtype.is_floating_point):
        raise InputError(f"w1_scale is for weights of fp8 or int8, not {w1.dtype}")
    if w1.dtype == torch.int8 and w1_scale.dim() != 2:
        shape = tuple(w1_scale.shape)
        raise InputError(f"w1_scale is {shape}; of int8 weights it is of rows, float32 {tuple(w1.shape[:2])}")


def _check_powers(w1: Tensor, scale_layout: str) -> None:
    """Refuse weights that have no powers of two along K, and orders of them that no kernel writes."""
    known = [powers_of(mode).layout for mode in MX_MODES]
    if (scale_layout or "rows") not in known:
        raise InputError(f"scale_layout is {scale_layout!r}; powers of two of experts are stored in {', '.join(known)}")
    if w1.dtype not in FORMATS:
        raise InputError(f"w1_scale is of powers of two, for OCP's fp8 and fp4, not {w1.dtype}")
