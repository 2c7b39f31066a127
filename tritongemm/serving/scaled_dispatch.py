"""Stage: a call with scale factors at run time → a kernel or PyTorch, from the records and tables of `dispatcher`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.serving import CallSignature
from tritongemm.operations.checks import check_layout, check_values
from tritongemm.operations.scaled import (
    ScaledOperands,
    ScaledProduct,
    check_devices,
    check_encoding,
    read_product,
)
from tritongemm.operations.torch_scaled import TorchScaled
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import CallAnswers, Dispatcher
from tritongemm.serving.scaled_call import ScaledCall


def resolve(dispatcher: Dispatcher, key: tuple[Any, ...], operands: ScaledOperands) -> Callable[..., Tensor]:
    """What serves calls of a key, kept in the thread's table for the next one.

    Raises:
        InputError: as `scaled_mm` says.
    """
    product = read_product(operands)
    answers = ask(dispatcher, product, operands)
    resolution, device = answers.resolution, answers.device
    otherwise = CheckedProduct(TorchScaled(product))
    ready: Callable[..., Tensor] = otherwise
    if resolution.kernel is not None and device is not None:
        shape = (*operands.a.shape[:-1], product.n)
        try:
            ready = ScaledCall(resolution.kernel, device.device, shape, operands.out_dtype, otherwise)
        except (TritonGemmError, LookupError):
            if resolution.kind == "exact":
                raise
    if resolution.lasting:
        keep(dispatcher.calls.table, key, ready)
    return ready


class CheckedProduct:
    """PyTorch's product, after a look at what no key holds.

    Args:
        compute: the product.
    """

    def __init__(self, compute: TorchScaled) -> None:
        self._compute = compute

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """The result.

        Raises:
            InputError: operands on several devices, a sparse bias, or factors that are no numbers on the CPU.
        """
        if bias is not None:
            check_layout("bias", bias)
        check_devices(ScaledOperands(a, b, scale_a, scale_b, bias))
        check_values(scale_a=scale_a, scale_b=scale_b)
        return self._compute(a, b, scale_a, scale_b, bias, out_dtype)


def ask(dispatcher: Dispatcher, product: ScaledProduct, operands: ScaledOperands) -> CallAnswers:
    """Who serves a product of these operands, and why.

    Raises:
        InputError: an fp8 encoding that this GPU does not read.
    """
    if not operands.a.is_cuda:
        return CallAnswers.pytorch(f"a is on {operands.a.device}; tuned kernels run on a GPU")
    if not product.dense:
        return CallAnswers.pytorch(f"b has strides {operands.b.stride()}; kernels take a dense weight")
    index = operands.a.get_device()
    device = dispatcher.device(index)
    if device is None:
        return CallAnswers.pytorch(
            "nothing is loaded on this device; call tritongemm.load or run it once first", lasting=False
        )
    target = device.target
    check_encoding(product, target)
    if not product.m:
        return CallAnswers.pytorch("an operand is empty")
    if operands.bias is not None and operands.bias.dtype != operands.out_dtype:
        return CallAnswers.pytorch(f"the bias is {operands.bias.dtype}; kernels take {operands.out_dtype}")
    problems = product.problems(target)
    if not problems:
        return CallAnswers.pytorch(product.why_none(target))
    return dispatcher.answer([CallSignature(problem) for problem in problems], index)


def explain(dispatcher: Dispatcher, operands: ScaledOperands) -> str:
    """Which kernel computes `scaled_mm` of these operands, and why; see `api.explain`.

    Raises:
        TypeError, InputError: as `scaled_mm`.
    """
    return str(ask(dispatcher, read_product(operands), operands))
