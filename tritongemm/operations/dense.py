"""The operation `mm`: a product of activations and a linear layer's weight."""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.operations.checks import check_fit
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES, linear, output_dtype


class DenseOperands(NamedTuple):
    """The arguments of `mm`."""

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


def are_transposed(x: Tensor, w: Tensor) -> tuple[bool, bool]:
    """Return whether x and w are read as transposed views of row-major matrices, as all that are not contiguous are."""
    return x.dim() == 2 and not x.is_contiguous(), not w.is_contiguous()


class Dense(ProductOperation):
    """X @ w.T (+ bias)."""

    schema = "mm(Tensor x, Tensor w, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
    operands = DenseOperands
    sources: ClassVar = {"a": "x", "b": "w"}

    def check(self, given: DenseOperands) -> DenseOperands:
        """Return the operands; those that no kernel takes are PyTorch's to refuse."""
        return given

    def read(self, checked: DenseOperands) -> Reading | Support:
        """Return the problem of a linear layer, or of one with transposed views, or why there is none."""
        x, w, bias, out_dtype = checked
        if x.layout != torch.strided or w.layout != torch.strided:
            return Support("an operand is sparse")
        if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
            return Support(f"x {tuple(x.shape)} and w {tuple(w.shape)} are not [..., K] and [N, K]")
        result = output_dtype(x, out_dtype)
        unknown = {x.dtype, w.dtype, result} - DTYPE_NAMES.keys()
        if unknown:
            return Support(f"no kernels for {', '.join(sorted(map(str, unknown)))}")
        n, k = w.shape
        if not x.numel() or not w.numel():
            return Support("an operand is empty")
        dtypes = DTYPE_NAMES[x.dtype], DTYPE_NAMES[w.dtype], DTYPE_NAMES[result]
        layer = layer_problem((x.numel() // k, n, k), dtypes, "none" if bias is None else "n")
        transposed_x, transposed_w = are_transposed(x, w)
        for name, one, turned in (("x", x, transposed_x), ("w", w, transposed_w)):
            if turned and not one.t().is_contiguous():
                return Support(f"{name} has strides {one.stride()}; kernels take dense matrices")
        problem = layer.stored(not transposed_x, transposed_w)
        wanted = problem.bias_dtype
        if bias is not None and (tuple(bias.shape) != (n,) or DTYPE_NAMES.get(bias.dtype) != wanted.name):
            return Support(f"the bias is {bias.dtype} {tuple(bias.shape)}; kernels take {wanted.torch} ({n},)")
        problems, shape = tuple(_coinciding(problem)), (*x.shape[:-1], n)
        return Reading(problems, self.tensors(checked), (shape, result), vector=x.dim() == 1)

    def is_cast(self, given: DenseOperands) -> bool:
        """Return whether autocast casts the operands, as those of a linear layer."""
        return True

    def infer(self, given: DenseOperands) -> Tensor:
        """Return a result without contents."""
        x, w, _, out_dtype = given
        check_fit(x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1], "[..., K] and [N, K]", x=x, w=w)
        return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=output_dtype(x, out_dtype))

    def fallback(self, checked: DenseOperands) -> Tensor:
        """Return the result of PyTorch's linear layer."""
        return linear(*checked)


DENSE = Dense()


def _coinciding(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, then those whose operands are the same memory: a matrix of one row or column has any order."""
    of_a = {problem.a.row_major: None} | (dict.fromkeys((True, False)) if 1 in (problem.m, problem.k) else {})
    of_b = {problem.b.row_major: None} | (dict.fromkeys((True, False)) if 1 in (problem.n, problem.k) else {})
    return (problem.stored(a, b) for a in of_a for b in of_b)
