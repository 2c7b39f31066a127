"""Whether a linear layer's activations are quantised: what loaded rows tell of both ways at the layer's M.

Quantising takes time that the product of fewer bits must win back, which it does not where N is small. The times are
those of the rows that serve the call: of the product with the quantisation of its A, and of the same product in the
activations' own type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.operations.served_problems import is_scaled, layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.calls import CallTable, keep
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_blocks import BlockOperands

TYPES: Final = (torch.bfloat16, torch.float16)  # of activations; float32 has a precision that may change


class Verdict(NamedTuple):
    """What loaded rows tell of a call.

    Attributes:
        unquantized: whether the product in the activations' own type is the faster one.
        text: the times, or why there is nothing to compare.
        lasting: whether an equal call will be judged alike until other records are loaded.
    """

    unquantized: bool
    text: str
    lasting: bool = True


class _Verdicts(threading.local):
    """What one thread has found, by shapes, strides and dtypes."""

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], Verdict] = {}
        self.valid_with: CallTable | None = None  # The dispatcher replaces its table when records are added.


_found: Final = _Verdicts()


def judge(operands: BlockOperands, scaled: Callable[[BlockOperands], ScaledOperands]) -> Verdict:
    """Which of both ways is faster, by the loaded rows.

    Args:
        operands: the layer's.
        scaled: gives the quantised product, of whose activations only shapes, strides and types count. It is called
            once for calls of one kind.

    Raises:
        InputError: operands that do not belong together.
    """
    x, weight, weight_scale, _, bias, out_dtype = operands
    calls = default_dispatcher().calls
    if _found.valid_with is not calls:
        _found.table, _found.valid_with = {}, calls
    key = (x.shape, x.dtype, weight.shape, weight.dtype, x.get_device(), weight_scale.shape, weight_scale.stride(),
           bias is None, out_dtype)  # fmt: skip
    verdict = _found.table.get(key)
    if verdict is None:
        verdict = _judge(scaled(operands), x.dtype)
        if verdict.lasting:
            keep(_found.table, key, verdict)
    return verdict


def _judge(operands: ScaledOperands, dtype: torch.dtype) -> Verdict:
    if dtype not in TYPES:
        return Verdict(False, f"activations of {dtype} are always quantised")
    device = default_dispatcher().device_kernels(operands.a.get_device())
    if device is None:
        where = operands.a.device
        return Verdict(False, f"nothing is loaded on {where}", lasting=not operands.a.is_cuda)
    product = read_product(operands)
    if not product.m:
        return Verdict(False, "there are no activations")
    names = DTYPE_NAMES[dtype], DTYPE_NAMES[dtype], DTYPE_NAMES[operands.out_dtype]
    plain = layer_problem((product.m, product.n, product.k), names, product.bias)
    return compare(device, product.problems(), plain)


def compare(device: DeviceKernels, scaled: Sequence[Problem], plain: Problem) -> Verdict:
    """Which of two products is faster, the time of quantising A before the first one included.

    Args:
        device: has the rows.
        scaled: what the quantised product can be taken for.
        plain: the same product in the activations' own type.
    """
    row = _first_record(device, scaled)
    other = device.find_record(plain)
    for found in (row, other):
        if isinstance(found, Support):
            return Verdict(False, found.reason)
    assert isinstance(row, Record) and isinstance(other, Record)
    if row.quantize_seconds is None:
        return Verdict(False, f"the row of {row.problem.key} does not tell how long A is quantised")
    if row.predicted or other.predicted:
        return Verdict(False, f"{(row if row.predicted else other).problem.key} was predicted, not measured")
    if other.problem.m < row.problem.m:
        return Verdict(False, f"{plain.key} was measured at M {other.problem.m}, {scaled[0].key} at {row.problem.m}")
    product, whole = device.served_seconds(row), device.served_seconds(other)
    if product is None or whole is None:
        return Verdict(False, f"{(row if product is None else other).problem.key} can't be launched here")
    pays = product + row.quantize_seconds < whole
    text = (
        f"{row.problem.dtypes} {product * 1e6:.2f} us and quantising A {row.quantize_seconds * 1e6:.2f} us "
        f"{'<' if pays else '>='} {plain.dtypes} {whole * 1e6:.2f} us"
    )
    return Verdict(not pays, text)


def _first_record(device: DeviceKernels, problems: Iterable[Problem]) -> Record | Support:
    found: Record | Support = Support("no family has such a product")
    for problem in problems:
        found = device.find_record(problem)
        if isinstance(found, Record):
            break
    return found


def losing_type(device: DeviceKernels, n: int, k: int) -> torch.dtype | None:
    """The type in which a weight is worth keeping beside the quantised one with factors along K, which loses to it
    somewhere; None where no rows say so.

    Args:
        device: has the rows.
        n: rows of the weight.
        k: columns of the weight.
    """
    rows = device.records.list_records(device.device.arch, device.device.compute_units)
    held = [r.problem for r in rows if (r.problem.n, r.problem.k) == (n, k)]
    scaled = [problem for problem in held if problem.scale_depth and is_scaled(problem)]
    for dtype in TYPES:
        name = DTYPE_NAMES[dtype]
        for problem in scaled:
            plain = layer_problem((problem.m, n, k), (name, name, problem.dtype_c), problem.bias)
            if compare(device, [problem], plain).unquantized:
                return dtype
    return None
