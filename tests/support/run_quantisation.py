"""Quantise by all kernels in Triton's interpreter, and compare with PyTorch's operations.

usage: TRITON_INTERPRET=1 python -m tests.support.run_quantisation
"""

import torch
from torch import Tensor

import tritongemm
from tritongemm.build.quantization_kernels import Quantization, choose_kernels
from tritongemm.codegen import modules
from tritongemm.core.helper_kernel import PARTS
from tritongemm.measure.guarded_operands import guarded
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.operations import microscaling

FORMATS = {"fp8e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
SHUFFLED = "e8m0_32x8"


def activations(m: int, k: int, spoiled: bool) -> Tensor:
    """Numbers with outliers, rows of very different sizes and one of zeros; or also what is no number in each row."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)) * torch.logspace(-5, 3, m)[:, None]
    x[:, k // 2] *= 100
    x[m // 2], x[-1, -1] = 0, 1e6
    if spoiled:
        x[[-3, -2, -1], [0, k - 1, k // 3]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x


def check(x: Tensor, granularity: str, dtype: torch.dtype, name: str, layout: str) -> None:
    """Quantise with guarded memory around the operands."""
    (m, k), (wanted, factors) = x.shape, tritongemm.quantize(x, granularity, dtype, layout)
    places = (tuple(factors.shape), scale_places(layout)) if granularity == "mx" else (factors.stride(),)
    kind = "bf16" if x.dtype == torch.bfloat16 else "fp32"
    flat = factors if granularity in ("mx", "block") else factors.view(-1)
    empty = {"q": torch.empty_like(wanted), "scale": torch.empty_like(flat), "part": torch.full((PARTS,), float("nan"))}
    known = {operand: guarded(tensor) for operand, tensor in ({"x": x} | empty).items()}
    for helper, given in choose_kernels(Quantization(m, k, kind, name, granularity, *places)):
        module = modules.run_text(helper.source, "quantisation")
        pointers = [known[p.removesuffix("_ptr")] for p, signature in helper.signature.items() if signature[0] == "*"]
        getattr(module, helper.name)[given.grid](*pointers, *given.numbers.values(), **helper.constants)
    case, scale = (name, granularity, layout, m), known["scale"].view_as(factors)
    torch.testing.assert_close(scale, factors, rtol=0, atol=0, equal_nan=True, msg=str(case))
    by_rows, width = tritongemm.quantize(x, granularity, dtype)[1], wanted.shape[1]
    depth = {"mx": 32 * width // k, "block": 128}.get(granularity, width)
    finite = by_rows != 255 if granularity == "mx" else by_rows.isfinite()
    there = finite.repeat_interleave(depth, 1)[:, :width].expand(wanted.shape)
    alike = (known["q"].view(torch.uint8) == wanted.view(torch.uint8))[there].double().mean()
    # The interpreter's own rounding to fp8 loses the carry to the next power of two.
    assert not there.any() or (alike > 0.9 if dtype.is_floating_point else alike == 1), (case, alike)


def main() -> None:
    # Rows longer than a program reads at once matter to factors of more than a block.
    for m, k, spoiled in ((5, 321, False), (2, 16500, False), (4, 16500, True), (4, 321, True)):
        x = activations(m, k, spoiled).bfloat16()
        for name, dtype in FORMATS.items() if k < 1000 else [("int8", torch.int8)]:
            for granularity, layout in (("tensor", "rows"), ("row", "rows"), ("block", "groups"))[
                : 3 if k < 1000 else 2
            ]:
                check(x, granularity, dtype, name, layout)
    for dtype, name in microscaling.FORMATS.items():
        for layout in ("rows", SHUFFLED) if "float4" not in str(dtype) else ():
            check(activations(35, 300, True), "mx", dtype, name, layout)
    print("alike")


if __name__ == "__main__":
    main()
