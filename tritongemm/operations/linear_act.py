"""The operation `linear_act`: a linear layer and what follows it: an activation, gate and up as one, or a residual."""

from dataclasses import replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.epilogues import EPILOGUES, IN_BLOCKS, RESIDUAL, RUN, is_gated, rows_of_factors
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Operand
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics import epilogues
from tritongemm.operations.checks import check_fit, check_kind, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.scaled import SCALED, CheckedScaled
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.operations.torch_products import DTYPE_NAMES, converted, linear, output_dtype
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

apply_epilogue, parts, quantize_blocks = epilogues.apply, epilogues.parts, epilogues.quantize


class ActivatedOperands(NamedTuple):
    """The arguments of `linear_act`."""

    x: Tensor
    w: Tensor
    act: str
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None

    @property
    def layer(self) -> DenseOperands:
        """The linear layer without the residual."""
        return DenseOperands(self.x, self.w, None if self.act == RESIDUAL else self.bias, self.result_type)

    @property
    def scaled(self) -> CheckedScaled | None:
        """The product, where its operands have scale factors; of a result in blocks that of a wider type."""
        if self.scale_a is None or self.scale_b is None:
            return None
        wanted = torch.bfloat16 if self.act in IN_BLOCKS else self.result_type
        return SCALED.check(ScaledOperands(self.x, self.w, self.scale_a, self.scale_b, self.layer.bias, wanted))

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result: fp8 of one in blocks, else bf16 of operands with scale factors."""
        default = torch.float8_e4m3fn if self.act in IN_BLOCKS else None if self.scale_a is None else torch.bfloat16
        return output_dtype(self.x, default if self.out_dtype is None else self.out_dtype)

    @property
    def run(self) -> int:
        """Rows of gate in w after which as many of up follow: those that share factors, or a few."""
        scaled = self.scaled
        return RUN if scaled is None else max(RUN, scaled.product.scalings_b[0].rows)

    @property
    def rows(self) -> int:
        """Rows of the product."""
        return prod(self.x.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; of one in blocks its rows, then their factors."""
        columns = self.w.shape[0] // (2 if is_gated(self.act) else 1)
        if self.act not in IN_BLOCKS:
            return (*self.x.shape[:-1], columns)
        return (self.rows + rows_of_factors(self.rows), columns)


def _added(x: Tensor, w: Tensor, residual: Tensor, *others: Any, **named: Any) -> ActivatedOperands:
    """Return the operands of `linear_add`."""
    return ActivatedOperands(x, w, RESIDUAL, residual, *others, **named)


def quantised_operands(
    x: Tensor,
    w: Tensor,
    act: str = "",
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *factors: Tensor | None,
    **named: Any,
) -> ActivatedOperands:
    """Return the operands of `linear_act_quantize`."""
    check_kind("act", act, str)
    check_kind("dtype", dtype, torch.dtype)
    return ActivatedOperands(x, w, f"{act}_block" if act else "block", bias, dtype, *factors, **named)


class ActivatedLayer(ProductOperation):
    """Act(x @ w.T (+ bias)); of gate and up, whose rows of w alternate, act(gate) * up; with `add` bias is a matrix."""

    schema = (
        "linear_act(Tensor x, Tensor w, str act, Tensor? bias=None, ScalarType? out_dtype=None, "
        "Tensor? scale_a=None, Tensor? scale_b=None) -> Tensor"
    )
    operands = ActivatedOperands
    sources: ClassVar = {"a": "x", "b": "w"}
    calls: ClassVar = {"linear_add": _added, "linear_act_quantize": quantised_operands}

    def check(self, given: ActivatedOperands) -> ActivatedOperands:
        """Return the operands, which belong together."""
        x, w, act, *_ = given
        check_tensors({name: one for name, one in given._asdict().items() if isinstance(one, Tensor) or name in "xw"})
        if (given.scale_a is None) != (given.scale_b is None):
            raise InputError("scale_a and scale_b go together")
        if act not in EPILOGUES[1:]:
            raise InputError(f"act is {act!r}; it may be {', '.join(EPILOGUES[1:])}")
        check_fit(x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1], "[..., K] and [N, K]", x=x, w=w)
        if is_gated(act) and w.shape[0] % (2 * (run := given.run)):
            raise InputError(
                f"w is {tuple(w.shape)}; with {act} it has {run} rows of gate, then {run} of up, in turn, "
                "as interleave_gate_up returns them"
            )
        wanted, (*_, columns) = given.result_type, given.shape
        if not wanted.is_floating_point:
            raise InputError(f"the result is {wanted}; activations are of floats")
        if act in IN_BLOCKS and (wanted.itemsize > 1 or columns % SCALED_BLOCK):
            raise InputError(f"the result is {wanted} of {columns} columns; blocks are of fp8, and of {SCALED_BLOCK}")
        if act == RESIDUAL and (given.bias is None or given.bias.shape != given.shape or given.bias.dtype != wanted):
            found = None if given.bias is None else f"{given.bias.dtype} {tuple(given.bias.shape)}"
            raise InputError(f"the residual is {found}; it must be {wanted} {given.shape}, as the result")
        if act != RESIDUAL and given.bias is not None:
            check_fit(given.bias.shape == w.shape[:1], "[N] and [N, K]", bias=given.bias, w=w)
        _ = given.scaled  # which refuses factors that are none of the operands'
        return given

    def read(self, checked: ActivatedOperands) -> Reading | Support:
        """Return the problem of a linear layer with this epilogue."""
        if not (checked.x.is_contiguous() and checked.w.is_contiguous()):
            return Support("x or w is not contiguous")
        if checked.act == RESIDUAL and checked.bias is not None and not checked.bias.is_contiguous():
            return Support("the residual is not contiguous")
        scaled = checked.scaled
        if scaled and checked.bias is not None and checked.act in IN_BLOCKS:
            return Support("a bias beside scale factors and a result in blocks")
        layer = SCALED.read(scaled) if scaled else DENSE.read(checked.layer)
        if isinstance(layer, Support):
            return layer
        of_c = Operand(DTYPE_NAMES[checked.result_type])
        found = [replace(p, epilogue=checked.act, c=of_c) for p in layer.problems[: None if scaled else 1]]
        why = next((why for p in found if not (why := registry.get(Family, p.family).computes(p))), SUPPORTED)
        problems = tuple(p for p in found if registry.get(Family, p.family).computes(p))
        if not problems:
            return Support(layer.why_none or why.reason)
        plain = layer.plain and replace(layer.plain, epilogue=checked.act, c=of_c)
        result, tensors = (checked.shape, checked.result_type), self.tensors(checked)
        return replace(layer, problems=problems, plain=plain, result=result, tensors=tensors)

    def infer(self, given: ActivatedOperands) -> Tensor:
        """Return a result without contents; the factors' check would fix the rows of a traced graph."""
        return given.x.new_empty(given.shape, dtype=given.result_type)

    def fallback(self, checked: ActivatedOperands) -> Tensor:
        """Return the activation of PyTorch's linear layer."""
        x, w, bias, wanted = checked.layer
        if wanted is not None and wanted.itemsize == 1:  # numbers that PyTorch neither adds nor activates
            wanted = None if checked.act in IN_BLOCKS else torch.float32
        product = SCALED.fallback(checked.scaled) if checked.scaled else linear(x, w, bias, wanted)
        if checked.act == RESIDUAL:
            assert checked.bias is not None
            return converted(product + checked.bias.to(product.dtype), checked.result_type)
        return finished(checked.act, product, checked.result_type, checked.run)


LINEAR_ACT = ActivatedLayer()


def finished(act: str, product: Tensor, dtype: torch.dtype, run: int = RUN) -> Tensor:
    """Return what an epilogue makes of a product; of one in blocks in a type of eight bits, and then the factors."""
    done = apply_epilogue(act, product, run)
    if act not in IN_BLOCKS:
        return converted(done, dtype)
    done = done.flatten(0, -2)
    m, columns = done.shape
    result = done.new_zeros((m + rows_of_factors(m), columns), dtype=dtype)
    if m:
        for part, found in zip(parts(result, m), quantize_blocks(done, dtype), strict=True):
            part.copy_(found)
    return result


def interleave_gate_up(gate: Tensor, up: Tensor, run: int = RUN) -> Tensor:
    """Return the weight of gate and up for `linear_act`, or their bias: the rows of both, by 8 of each in turn.

    Weights of fp8 or int8 with factors for 128 x 128 alternate by 128 rows (``run=128``), their factors by one.

    Args:
        gate: the weight [N, K] whose product is activated, N a multiple of `run`; or a bias [N], or factors.
        up: the weight whose product is multiplied by it, of the same shape.
        run: the number of rows of each in turn.

    Returns:
        [2 N, K], or [2 N].

    Raises:
        InputError: the shapes or types differ, or N is no multiple of `run`.

    Examples:
        >>> tritongemm.interleave_gate_up(torch.zeros(8, 4), torch.ones(8, 4)).shape
        torch.Size([16, 4])
    """
    check_tensors({"gate": gate, "up": up})
    if not isinstance(run, int) or run < 1:
        raise InputError(f"run is {run!r}; give a number of rows")
    alike = gate.dim() > 0 and gate.shape == up.shape and gate.dtype == up.dtype
    check_fit(alike and len(gate) % run == 0, f"of one shape and type, rows a multiple of {run}", gate=gate, up=up)
    return epilogues.interleaved(gate, up, run)
