"""The public call `linear_fp8`: a linear layer of a quantised weight.

Loaded rows decide whether activations are quantised on the way, and in which layout their factors are stored.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.scaling import GRANULARITIES, PADDED_ROWS, SCALED_BLOCK, Scaling
from tritongemm.core.served_call import INVARIANT, Resolution
from tritongemm.core.support import Support
from tritongemm.operations.checks import check_tensors, check_values
from tritongemm.operations.quantisation import empty_factors, empty_pair
from tritongemm.operations.quantised_layer import QUANTISED_LAYER, CheckedLayer, LayerOperands, factors_of_rows
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.operations.served_problems import is_scaled, layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.api import mm
from tritongemm.serving.calls import NOT_TUNED, keep
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.dispatcher import CallAnswers, default_dispatcher
from tritongemm.serving.products import multiply_quantized, scaled_mm
from tritongemm.serving.quantize import quantize
from tritongemm.serving.traced_operations import define

# Layouts of factors along K, by what rows say of them; PyTorch's own products want the first.
_LAYOUT_OF: Final = {
    GRANULARITIES[name][0]: layout
    for name, layout in (("block", "groups"), ("block_rows", "rows"), ("block_tma", "tma"))
}
LAYOUTS: Final = tuple(_LAYOUT_OF.values())
AS_IT_IS = "as it is"  # activations that are quantised already
COPIED = "copied"  # such activations, whose factors are copied to where the rows want them
_NEAR = "near"
_UNKNOWN: Final = "unknown"


class BlockOperands(NamedTuple):
    """The operands of a layer in blocks: activations [..., K], quantised or not, the weight [N, K] and its factors."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    x_scale: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    out: Tensor | None = None  # dense memory for the product of quantised activations, which may stay unused


def find_layout(operands: BlockOperands, near: bool) -> str | None:
    """Return the layout of activations' factors that the tuned kernel of a call reads; None where no row holds for it.

    Activations that are quantised already are served where their factors are stored so: `AS_IT_IS`; else where a row
    wants those of a group padded, as DeepGEMM does, and they are dense, as CUTLASS's are, or the reverse: `COPIED`.
    With `near` a row of another M holds too, where `serves_other_m` says so and none has this M. Where rows must be
    invariant, it is at every M the first layout of a product that has rows, whatever their M.
    """
    x, weight, weight_scale, x_scale, bias, out_dtype, _ = operands
    dispatcher = default_dispatcher()
    held = dispatcher.scaled_weights.get(weight.shape)
    if held is None or not x.is_cuda:
        return None
    scales = None if x_scale is None else (x_scale.shape, x_scale.stride())
    key = (
        "layout", x.shape, x.dtype, weight.shape, weight.dtype, x.get_device(), weight_scale.shape,
        weight_scale.stride(), scales, bias is None, out_dtype, near,
    )  # fmt: skip
    found: dict[Any, Any] = dispatcher.calls.table
    known: str | None = found.get(key, _UNKNOWN)
    if known is not _UNKNOWN:
        return known
    rows, spans = x.numel() // max(x.shape[-1], 1), dict[range, str]()
    if x_scale is None:
        spans = found.setdefault((*key[:1], x.shape[-1], *key[2:]), spans)
    chosen: str | None = next((layout for span, layout in spans.items() if rows in span), None)
    nearest, lasting = chosen, True
    for layout, given in () if chosen else _forms(operands, held):
        try:
            answers = dispatcher.ask(SCALED, SCALED.check(given))
        except InputError:  # A server's operands may be of another kind altogether.
            continue
        resolution = answers.resolution
        lasting = lasting and resolution.lasting
        if resolution.kind == INVARIANT and not _has_rows(resolution, x.get_device()):
            continue
        if resolution.kind in (_NEAR, INVARIANT) and not dispatcher.wants_invariant_rows:
            nearest = nearest or layout
        elif resolution.kind not in NOT_TUNED:
            chosen = layout
            spans |= {} if x_scale is not None else _layout_of_span(answers)
            break
    if near:
        chosen = chosen or nearest
    if lasting:
        keep(found, key, chosen)
    return chosen


def _layout_of_span(answers: CallAnswers) -> dict[range, str]:
    """Return the M that a row alone serves, and the layout that its kernel reads at each; nothing where there is none.

    It may be another than the one that was asked for: dense factors are padded ones too at a multiple of four rows.
    """
    device, record = answers.device, answers.resolution.record
    if device is None or record is None or not answers.resolution.lasting or device.is_algorithm(record):
        return {}
    a, b = record.problem.scalings
    span = device.span(record.problem, [record.problem.scaled((one, b)) for one in _LAYOUT_OF])
    return {span: _LAYOUT_OF[a]} if span and a in _LAYOUT_OF else {}


def _has_rows(resolution: Resolution, index: int) -> bool:
    """Return whether a product for which an untuned kernel was found has rows at some M."""
    device, record = default_dispatcher().device_kernels(index), resolution.record
    if device is None or record is None:
        return False
    return bool(device.records.near_rows(record.problem, device.device.arch, device.device.compute_units))


def _forms(operands: BlockOperands, held: Container[Scaling | None]) -> Iterator[tuple[str, ScaledOperands]]:
    """Yield what could be multiplied, by the layout of the activations' factors, of which rows hold some."""
    x, weight, weight_scale, x_scale, bias, out_dtype, _ = operands
    if x_scale is not None:
        one = ScaledOperands(x, weight, x_scale, weight_scale, bias, out_dtype)
        yield AS_IT_IS, one
        m, by_groups = x_scale.shape[0], x_scale.dim() == 2 and 1 in (x_scale.shape[0], x_scale.stride(0))
        if by_groups and m % PADDED_ROWS and x_scale.shape[1] == cdiv(x.shape[-1], SCALED_BLOCK):
            yield COPIED, one._replace(scale_a=_make_other(x_scale))
        return
    q = torch.empty_like(x, dtype=weight.dtype)
    for layout in (layout for scaling, layout in _LAYOUT_OF.items() if scaling in held):
        factors = empty_factors(x, "block", layout)
        yield layout, ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype)


def copy_factors(given: ScaledOperands) -> ScaledOperands:
    """Return operands with activations' factors [M, groups] padded where they are dense, and dense where padded.

    Padded are those of a group to 16 bytes.
    """
    return given._replace(scale_a=_make_other(given.scale_a).copy_(given.scale_a))


def _make_other(factors: Tensor) -> Tensor:
    m, padded = factors.shape[0], round_up(factors.shape[0], PADDED_ROWS)
    strides = 1, m if factors.stride(1) == padded else padded
    return torch.empty_strided(factors.shape, strides, dtype=factors.dtype, device=factors.device)


def compute(operands: BlockOperands, layout: str) -> Tensor:
    """Return the product, with activations quantised to a layout that `find_layout` gave."""
    x, weight, weight_scale, x_scale, bias, out_dtype, _ = operands
    if x_scale is None:
        q, factors = quantize(x, "block", weight.dtype, layout)
        return multiply_quantized(ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype))
    given = ScaledOperands(x, weight, x_scale, weight_scale, bias, out_dtype)
    return scaled_mm(*(copy_factors(given) if layout == COPIED else given)[:6])


TYPES: Final = (torch.bfloat16, torch.float16)  # of activations; float32 has a precision that may change


class LayerChoice(NamedTuple):
    """The decision on a call by loaded rows.

    It is whether the product in the activations' own type is the faster one, with the times, or why there is nothing to
    compare; a lasting one holds for equal calls until other records are loaded.
    """

    unquantized: bool
    text: str
    lasting: bool = True


def choose(operands: BlockOperands, scaled: Callable[[BlockOperands], ScaledOperands]) -> LayerChoice:
    """Return which of both ways is faster, by the loaded rows.

    `scaled` gives the quantised product, of whose activations only shapes, strides and types count. It is called once
    for calls of one kind.

    Raises:
        InputError: operands that do not belong together.
    """
    x, weight, weight_scale, _, bias, out_dtype, _ = operands
    found: dict[Any, Any] = default_dispatcher().calls.table
    key = (
        "quantised", x.shape, x.dtype, weight.shape, weight.dtype, x.get_device(), weight_scale.shape,
        weight_scale.stride(), bias is None, out_dtype,
    )  # fmt: skip
    choice: LayerChoice | None = found.get(key)
    if choice is None:
        choice = _decide(scaled(operands), x.dtype)
        if choice.lasting:
            keep(found, key, choice)
    return choice


def _decide(operands: ScaledOperands, dtype: torch.dtype) -> LayerChoice:
    if dtype not in TYPES:
        return LayerChoice(False, f"activations of {dtype} are always quantised")
    device = default_dispatcher().device_kernels(operands.a.get_device())
    if device is None:
        where = operands.a.device
        return LayerChoice(False, f"nothing is loaded on {where}", lasting=not operands.a.is_cuda)
    product = read_product(operands)
    if not product.m:
        return LayerChoice(False, "there are no activations")
    names = DTYPE_NAMES[dtype], DTYPE_NAMES[dtype], DTYPE_NAMES[operands.out_dtype]
    plain = layer_problem((product.m, product.n, product.k), names, product.bias)
    return compare(device, product.problems(), plain)


def compare(device: DeviceKernels, scaled: Sequence[Problem], plain: Problem) -> LayerChoice:
    """Return which of two products is faster, the time of quantising A before the first one included."""
    row = _first_record(device, scaled)
    other = device.find_record(plain)
    for found in (row, other):
        if isinstance(found, Support):
            return LayerChoice(False, found.reason)
    assert isinstance(row, Record) and isinstance(other, Record)
    if row.quantize_seconds is None:
        return LayerChoice(False, f"the row of {row.problem.key} does not say how long A is quantised")
    if row.predicted or other.predicted:
        return LayerChoice(False, f"{(row if row.predicted else other).problem.key} was predicted, not measured")
    if other.problem.m < row.problem.m:
        return LayerChoice(False, f"{plain.key} was timed at M {other.problem.m}, {scaled[0].key} at {row.problem.m}")
    product, unquantized = device.served_seconds(row), device.served_seconds(other)
    if product is None or unquantized is None:
        return LayerChoice(False, f"{(row if product is None else other).problem.key} can't be launched here")
    pays = product + row.quantize_seconds < unquantized
    text = (
        f"{row.problem.dtypes} {product * 1e6:.2f} us and quantising A {row.quantize_seconds * 1e6:.2f} us "
        f"{'<' if pays else '>='} {plain.dtypes} {unquantized * 1e6:.2f} us"
    )
    return LayerChoice(not pays, text)


def _first_record(device: DeviceKernels, problems: Iterable[Problem]) -> Record | Support:
    found: Record | Support = Support("no family has such a product")
    for problem in problems:
        found = device.find_record(problem)
        if isinstance(found, Record):
            break
    return found


def losing_type(index: int, n: int, k: int) -> torch.dtype | None:
    """Return the type in which a weight is worth keeping beside one with factors along K, which loses to it
    somewhere on a GPU; None where no rows say so.
    """
    device = default_dispatcher().device_kernels(index)
    if device is None:
        return None
    rows = device.records.list_records(device.device.arch, device.device.compute_units)
    held = [r.problem for r in rows if (r.problem.n, r.problem.k) == (n, k)]
    scaled = [problem for problem in held if problem.scale_depth and is_scaled(problem)]
    for dtype in TYPES:
        name = DTYPE_NAMES[dtype]
        for problem in scaled:
            plain = layer_problem((problem.m, n, k), (name, name, problem.c.dtype), problem.bias)
            if compare(device, [problem], plain).unquantized:
                return dtype
    return None


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    unquantized: Tensor | None = None,
) -> Tensor:
    """Compute x @ (weight * weight_scale).T (+ bias): one kernel quantises x, then `scaled_mm` multiplies it.

    Where the weight's factors change along K, activations have a factor for each 128 elements along K, in the layout
    that the tuned kernel of this size reads, or a power of two for each 32 where the weight has that (OCP MX); else
    they have one for each row. Under torch.compile both kernels are one operation. There is no gradient for x. NaN and
    infinity in x are no error: they make their row of the result NaN.

    Given `unquantized` too, the loaded rows decide at each M: where quantisation and quantised product together take no
    less time than the product in x's type does by its own row, that one is computed. `tritongemm.explain` says which.

    Args:
        x: [..., K] of bfloat16, float16 or float32.
        weight: [N, K] of fp8 or int8; of fp4 bytes [N, K / 2].
        weight_scale: float32: one, [N], [N / 128, K / 128] or [N, K / 128]; or e8m0 [N, K / 32].
        bias: [N] or None.
        out_dtype: x's by default.
        unquantized: the weight [N, K] in x's type, its factors multiplied in, or None.

    Returns:
        [..., N], dense, in order of the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: operands that do not belong together.

    Examples:
        >>> weight, scale = tritongemm.quantize(torch.randn(32, 256))
        >>> tritongemm.linear_fp8(torch.randn(4, 256), weight, scale.flatten()).shape
        torch.Size([4, 32])
    """
    check_tensors({"x": x, "weight": weight, "weight_scale": weight_scale})
    wanted = x.dtype if out_dtype is None else out_dtype
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(x, weight, weight_scale, bias, wanted, unquantized)
        return result
    return _linear(x, weight, weight_scale, bias, wanted, unquantized)


def explain_layer(checked: CheckedLayer) -> str:
    """Return whether `linear_fp8` quantises these activations, and why; then which kernel multiplies.

    Returns:
        A line ``quantised: times`` or ``unquantised: times``, or the reason in place of the times, and the lines of
        `tritongemm.explain` for the product.
    """
    dispatcher, (x, *_, bias, _, unquantized) = default_dispatcher(), checked.given
    choice = _choose(checked)
    if choice.unquantized and unquantized is not None:
        answers = dispatcher.explain(x, unquantized, bias, checked.given.result_type)
        return f"unquantised: {choice.text}\n{answers}"
    lacking = ", but no unquantised weight is given" if choice.unquantized else ""
    answers = dispatcher.ask(SCALED, SCALED.check(_scaled_operands(checked)))
    return f"quantised: {choice.text}{lacking}\n{answers}"


def _linear(*given: Any, **named: Any) -> Tensor:
    operands = LayerOperands(*given, **named)
    x, weight, scale, bias, out_dtype, unquantized = operands
    assert out_dtype is not None
    table: dict[Any, Any] = default_dispatcher().calls.table
    key = "linear_fp8", x.shape, weight.shape, weight.dtype, scale.shape, scale.stride(), scale.dtype
    granularity: str | None = table.get(key) if unquantized is None else None
    if granularity is None:  # which takes longer than all else of the host
        granularity = QUANTISED_LAYER.check(operands).granularity
        keep(table, key, granularity)
    checked = CheckedLayer(operands, granularity)
    if unquantized is not None and _choose(checked).unquantized:
        return mm(x, unquantized, bias, out_dtype)
    check_values(weight_scale=scale)
    if granularity == "block":
        blocks = _block_operands(checked)
        return compute(blocks, find_layout(blocks, near=True) or LAYOUTS[0])
    q, of_q = quantize(x, granularity, weight.dtype)
    factors = factors_of_rows(weight, scale) if granularity == "row" else scale
    return multiply_quantized(ScaledOperands(q, weight, of_q, factors, bias, out_dtype))


def _choose(checked: CheckedLayer) -> LayerChoice:
    if default_dispatcher().wants_invariant_rows:
        return LayerChoice(False, "rows must be invariant, so activations are quantised at every M")
    return choose(_block_operands(checked), lambda _: _scaled_operands(checked))


def _block_operands(checked: CheckedLayer) -> BlockOperands:
    x, weight, weight_scale, bias, *_ = checked.given
    return BlockOperands(x, weight, weight_scale, None, bias, checked.given.result_type)


def _scaled_operands(checked: CheckedLayer) -> ScaledOperands:
    """Return what `scaled_mm` would be given; the memory of activations and of their factors holds nothing."""
    (x, weight, weight_scale, bias, *_), granularity = checked
    layout, factors = "rows", weight_scale
    if granularity == "block":
        layout = find_layout(_block_operands(checked), near=True) or LAYOUTS[0]
    elif granularity == "row":
        factors = factors_of_rows(weight, weight_scale)
    q, scale = empty_pair(x, granularity, weight.dtype, layout)
    return ScaledOperands(q, weight, scale, factors, bias, checked.given.result_type)


_trace = define(QUANTISED_LAYER, _linear)
