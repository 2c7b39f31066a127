"""Operation: the products of all rows of a matrix with one another."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from tritongemm.core.support import Support
from tritongemm.operations.checks import check_fit, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES


class GramOperands(NamedTuple):
    """The arguments of `gram`."""

    x: Tensor


class Gram(ProductOperation):
    """X @ x.T for x [M, K]."""

    schema = "gram(Tensor x) -> Tensor"
    operands = GramOperands
    sources: ClassVar = {"a": "x", "b": "x"}  # the activations and the weight of a linear layer

    def check(self, given: GramOperands) -> GramOperands:
        """The operand, which is a matrix."""
        check_tensors({"x": given.x})
        check_fit(given.x.dim() == 2, "[M, K]", x=given.x)
        return given

    def read(self, checked: GramOperands) -> Reading | Support:
        """The problem of that layer."""
        x, name = checked.x, DTYPE_NAMES.get(checked.x.dtype)
        if name is None or not x.is_contiguous() or not x.numel():
            return Support(f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; kernels take dense rows")
        (m, k), result = x.shape, (x.shape[0], x.shape[0])
        problem = layer_problem((m, m, k), (name, name, name), "none")
        return Reading((problem,), self.tensors(checked), (result, x.dtype))

    def fallback(self, checked: GramOperands) -> Tensor:
        """PyTorch's product."""
        return checked.x @ checked.x.mT


GRAM = Gram()
