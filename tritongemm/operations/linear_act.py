"""The operation `linear_act`: a linear layer and its activation, or the product of a gate's and of other columns."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.epilogues import EPILOGUES, IN_BLOCKS, RUN, is_gated, rows_of_factors
from tritongemm.core.errors import InputError
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.support import Support
from tritongemm.numerics import epilogues
from tritongemm.operations.checks import check_fit, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.torch_products import linear, output_dtype

apply_epilogue, parts, quantize_blocks = epilogues.apply, epilogues.parts, epilogues.quantize


class ActivatedOperands(NamedTuple):
    """The arguments of `linear_act`."""

    x: Tensor
    w: Tensor
    act: str
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def layer(self) -> DenseOperands:
        """The linear layer."""
        return DenseOperands(self.x, self.w, self.bias, self.result_type)

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result: fp8 of one in blocks."""
        default = torch.float8_e4m3fn if self.act in IN_BLOCKS else None
        return output_dtype(self.x, self.out_dtype or default)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; of one in blocks its rows, then their factors."""
        columns = self.w.shape[0] // (2 if is_gated(self.act) else 1)
        if self.act not in IN_BLOCKS:
            return (*self.x.shape[:-1], columns)
        rows = self.x.numel() // self.x.shape[-1]
        return (rows + rows_of_factors(rows), columns)


class ActivatedLayer(ProductOperation):
    """Act(x @ w.T (+ bias)); of gate and up, whose rows of w alternate, act(gate) * up."""

    schema = "linear_act(Tensor x, Tensor w, str act, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
    operands = ActivatedOperands
    sources: ClassVar = {"a": "x", "b": "w"}

    def check(self, given: ActivatedOperands) -> ActivatedOperands:
        """Return the operands, which belong together."""
        x, w, act, bias, _ = given
        check_tensors({"x": x, "w": w} | ({} if bias is None else {"bias": bias}))
        if act not in EPILOGUES[1:]:
            raise InputError(f"act is {act!r}; it may be {', '.join(EPILOGUES[1:])}")
        check_fit(x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1], "[..., K] and [N, K]", x=x, w=w)
        if is_gated(act) and w.shape[0] % (2 * RUN):
            raise InputError(
                f"w is {tuple(w.shape)}; with {act} it has {RUN} rows of gate, then {RUN} of up, and so on"
            )
        wanted, (*_, columns) = given.result_type, given.shape
        if not wanted.is_floating_point:
            raise InputError(f"the result is {wanted}; activations are of floats")
        if act in IN_BLOCKS and (wanted.itemsize > 1 or columns % SCALED_BLOCK):
            raise InputError(f"the result is {wanted} of {columns} columns; blocks are of fp8, and of {SCALED_BLOCK}")
        return given

    def read(self, checked: ActivatedOperands) -> Reading | Support:
        """Return the problem of a linear layer with this epilogue."""
        if not (checked.x.is_contiguous() and checked.w.is_contiguous()):
            return Support("x or w is not contiguous")
        layer = DENSE.read(checked.layer)
        if isinstance(layer, Support):
            return layer
        problem = replace(layer.problems[0], epilogue=checked.act)
        return replace(layer, problems=(problem,), result=(checked.shape, checked.result_type))

    def infer(self, given: ActivatedOperands) -> Tensor:
        """Return a result without contents."""
        checked: ActivatedOperands = self.check(given)
        return checked.x.new_empty(checked.shape, dtype=checked.result_type)

    def fallback(self, checked: ActivatedOperands) -> Tensor:
        """Return the activation of PyTorch's linear layer."""
        if checked.act not in IN_BLOCKS:
            return apply_epilogue(checked.act, linear(*checked.layer))
        result, rows = torch.zeros_like(self.infer(checked)), checked.x.numel() // checked.x.shape[-1]
        product = linear(checked.x, checked.w, checked.bias, None)
        q, factors = parts(result, rows)
        found = quantize_blocks(apply_epilogue(checked.act, product.flatten(0, -2)), result.dtype)
        q.copy_(found[0])
        factors.copy_(found[1])
        return result


LINEAR_ACT = ActivatedLayer()


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return the weight of gate and up for `linear_act`, or their bias: the rows of both, by 8 of each in turn.

    Args:
        gate: the weight [N, K] whose product is activated, N a multiple of 8; or a bias [N].
        up: the weight whose product is multiplied by it, of the same shape.

    Returns:
        [2 N, K], or [2 N].

    Raises:
        InputError: the shapes differ, or N is no multiple of 8.

    Examples:
        >>> tritongemm.interleave_gate_up(torch.zeros(8, 4), torch.ones(8, 4)).shape
        torch.Size([16, 4])
    """
    check_fit(
        gate.shape == up.shape and len(gate) % RUN == 0, f"of one shape, rows a multiple of {RUN}", gate=gate, up=up
    )
    return epilogues.interleaved(gate, up)
