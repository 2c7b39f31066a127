"""The operation `linear_act`: a linear layer and its activation, or the product of a gate's and of other columns."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.epilogues import EPILOGUES, GATED, RUN
from tritongemm.core.errors import InputError
from tritongemm.core.support import Support
from tritongemm.numerics import epilogues
from tritongemm.operations.checks import check_fit, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.torch_products import linear, output_dtype

apply_epilogue = epilogues.apply


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
        return DenseOperands(self.x, self.w, self.bias, self.out_dtype)


class ActivatedLayer(ProductOperation):
    """Act(x @ w.T (+ bias)); of gate and up, whose rows of w alternate, act(gate) * up."""

    schema = "linear_act(Tensor x, Tensor w, str act, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
    operands = ActivatedOperands
    sources: ClassVar = {"a": "x", "b": "w"}

    def check(self, given: ActivatedOperands) -> ActivatedOperands:
        """Return the operands, which belong together."""
        x, w, act, bias, out_dtype = given
        check_tensors({"x": x, "w": w} | ({} if bias is None else {"bias": bias}))
        if act not in EPILOGUES[1:]:
            raise InputError(f"act is {act!r}; it may be {', '.join(EPILOGUES[1:])}")
        check_fit(x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1], "[..., K] and [N, K]", x=x, w=w)
        if act in GATED and w.shape[0] % (2 * RUN):
            raise InputError(
                f"w is {tuple(w.shape)}; with {act} it has {RUN} rows of gate, then {RUN} of up, and so on"
            )
        if not output_dtype(x, out_dtype).is_floating_point:
            raise InputError(f"the result is {output_dtype(x, out_dtype)}; activations are of floats")
        return given

    def read(self, checked: ActivatedOperands) -> Reading | Support:
        """Return the problem of a linear layer with this epilogue."""
        if not (checked.x.is_contiguous() and checked.w.is_contiguous()):
            return Support("x or w is not contiguous")
        layer = DENSE.read(checked.layer)
        if isinstance(layer, Support):
            return layer
        (*lead, _), dtype = layer.result
        problem = replace(layer.problems[0], epilogue=checked.act)
        return replace(layer, problems=(problem,), result=((*lead, problem.columns), dtype))

    def infer(self, given: ActivatedOperands) -> Tensor:
        """Return a result without contents."""
        x, w, act, *_ = self.check(given)
        columns = w.shape[0] // (2 if act in GATED else 1)
        return x.new_empty((*x.shape[:-1], columns), dtype=output_dtype(x, given.out_dtype))

    def fallback(self, checked: ActivatedOperands) -> Tensor:
        """Return the activation of PyTorch's linear layer."""
        return apply_epilogue(checked.act, linear(*checked.layer))


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
