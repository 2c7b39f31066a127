from functools import partial

import torch
from torch import Tensor

import tritongemm
from tests.support.nouns import Family, Operands, Problem, registry
from tests.support.operation_calls import Call

SHUFFLED = "e8m0_32x8"


def make_call(of: Problem, device: str = "cpu", seed: int = 0) -> tuple[Call, Operands, Tensor]:
    """The call that looks a problem up, its operands as kernels read them, and the exact result.

    The scale factors of families are in memory as kernels read them; a caller's have one row for each row of its
    operand, whatever the rows are padded to.
    """
    family = registry.get(Family, of.family)
    made = family.make_inputs(of, device, seed=seed)
    a, b, bias = made["a"], made["b"], made.get("bias")
    exact, result = family.reference(of, made), getattr(torch, of.c.type.torch)
    its_a, its_b = of.a.scaling, of.b.scaling
    named = {"scale_layout": SHUFFLED} if its_a is not None and its_a.layout == SHUFFLED else {}
    scales = [
        made[name].mT if its.depth and its.layout == "groups" else made[name]
        for name, its in (("scale_a", its_a), ("scale_b", its_b))
        if its is not None
    ]
    if of.epilogue == "add" and bias is not None:
        bias = bias.view(exact.shape)
    if of.epilogue != "none":
        return Call(tritongemm.linear_act, a, b.T, of.epilogue, bias, result, *scales), made, exact
    if of.batch > 1:
        a, b = (one if one.dim() == 3 else one.expand(of.batch, *one.shape) for one in (a, b))
    if its_a is None and its_b is not None and of.groups:
        given = a, b, made[of.group_operand], None, made["scale_b"], result
        return Call(tritongemm.grouped_mm, *given, order_b=of.b.order), made, exact
    if its_a is None and its_b is not None:
        return Call(tritongemm.linear_w4, a, b.T, made["scale_b"], of.b.order, bias, result), made, exact
    if its_a is None or its_b is None:
        if of.groups:
            return Call(tritongemm.grouped_mm, a, b, made[of.group_operand], out_dtype=result), made, exact
        function, w = (tritongemm.bmm, b) if of.batch > 1 else (tritongemm.mm, b.T)
        return Call(function, a, w, bias, result), made, exact
    of_a, of_b = scales
    is_mixed = of.b.type.packed > of.a.type.packed
    if is_mixed and not of.groups:
        four = partial(Call, tritongemm.linear_w4, a, b.T, made["scale_b"])
        return four(of.b.order, bias, result, scale_x=of_a[: of.m]), made, exact
    if of.groups:
        of_a = of_a.reshape(*a.shape[:-1], -1) if of.masked and not named else of_a
        of_a = of_a if its_a.depth else of_a.reshape(a.shape[:-1])
        of_b = of_b if its_b.depth else of_b.reshape(b.shape[0], -1)
        if is_mixed:
            named, of_b = {"order_b": of.b.order}, made["scale_b"]
        return Call(tritongemm.grouped_mm, a, b, made[of.group_operand], of_a, of_b, result, **named), made, exact
    if of.batch > 1:
        of_b = of_b.mT if its_b.depth else of_b
        of_a = of_a if named or not its_a.depth else of_a[..., : of.m, :]
        of_a, of_b = (
            one.expand(of.batch, *one.shape) if operand.shared else one for one, operand in ((of_a, of.a), (of_b, of.b))
        )
        return Call(tritongemm.scaled_bmm, a, b, of_a, of_b, bias, result, **named), made, exact
    of_a = of_a if named or not its_a.depth else of_a[: of.m]
    return Call(tritongemm.scaled_mm, a, b.T, of_a, of_b, bias, result, **named), made, exact
