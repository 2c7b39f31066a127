"""Execute the kernels beside the products on an emulated AMD GPU, and compare them with PyTorch's operations.

usage: run_helpers.py EMULATOR CHECKOUT ARCHITECTURE CACHE
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.nouns import ArtifactCache, Target, load_target
from tritongemm.build.expert_kernels import Chosen
from tritongemm.build.helpers import compile_helper, launch_helper
from tritongemm.build.quantization_kernels import Quantization, choose_kernels
from tritongemm.core.helper_kernel import PARTS
from tritongemm.core.scaling import MX_MODES, powers_of
from tritongemm.operations import mixture_steps
from tritongemm.operations import quantisation as quantization
from tritongemm.operations.factors import spread
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.mixtures import MoeKernels

K = 330  # no multiple of a block, nor of what a thread loads at once


class Emulated:
    """An emulated GPU that helper kernels run on, with memory operations that land as late as the code allows."""

    def __init__(self, device: Any, target: Target, cache: ArtifactCache) -> None:
        self._device, self.target, self._cache = device, target, cache
        self.races, self.launches = 0, 0

    def run(self, chosen: Chosen, operands: Mapping[str, Tensor]) -> None:
        """Launch one kernel on tensors of this host, which hold afterwards what it wrote."""
        helper, given = chosen
        launch = launch_helper(compile_helper(helper, self.target, self._cache), helper, given, self.target)
        at = {tensor.data_ptr(): self._device.buffer(tensor.view(torch.uint8)) for tensor in operands.values()}
        held = {name: at[tensor.data_ptr()] for name, tensor in operands.items()}
        arguments = [
            (held[str(p.value)] if p.value else None) if p.kind == "pointer" else p.value for p in launch.params
        ]
        module = self._device.load(launch.read_code())
        done = module.launch(launch.symbol, launch.grid, launch.block, arguments, launch.shared, late=True)
        for name, tensor in operands.items():
            held[name].check()
            held[name].download(tensor.data_ptr())
        self.races, self.launches = self.races + done.races, self.launches + 1


class EmulatedSteps(MoeKernels):
    def __init__(self, gpu: Emulated) -> None:
        super().__init__(None, {})  # type: ignore[arg-type]
        self._gpu = gpu

    def _run(self, choose: Any, asked: tuple[Any, ...], operands: dict[str, Tensor]) -> bool:
        self._gpu.run(choose(*asked), operands)
        return True


def activations(m: int, k: int) -> Tensor:
    """Numbers with outliers, and a row of zeros."""
    x = torch.randn(m, k) * torch.logspace(-5, 3, m)[:, None]
    x[m // 2] = 0
    return x.bfloat16()


def differ(found: Tensor, wanted: Tensor) -> float:
    """The share of elements that are not the same."""
    return float((found.float() != wanted.float()).double().mean())


def quantised(gpu: Emulated, dtype: torch.dtype, granularity: str, m: int) -> float:
    """The share of numbers that a kernel quantises to others than PyTorch's operations do."""
    x = activations(m, K)
    wanted, factors = quantization.by_torch(x, granularity, dtype, "rows")
    q, scale = torch.empty_like(wanted), torch.full_like(factors, -1.0)
    operands = {"x": x, "q": q, "scale": scale, "part": torch.full((PARTS,), float("nan"))}
    asked = Quantization(m, K, "bf16", DTYPE_NAMES[dtype], granularity, (scale.stride(0), scale.stride(1)))
    for chosen in choose_kernels(asked):
        names = [name.removesuffix("_ptr") for name, kind in chosen[0].signature.items() if kind.startswith("*")]
        gpu.run(chosen, {name: operands[name] for name in names})
    return max(differ(q, wanted), 1.0 - float(torch.isclose(scale, factors, rtol=1e-6, atol=0).double().mean()))


def mixture(gpu: Emulated, dtype: torch.dtype, mode: str) -> float:
    """The same of the steps between the products of a mixture."""
    steps, tokens, topk, experts = EmulatedSteps(gpu), 9, 3, 4
    ids, weights = torch.randint(-1, experts + 1, (tokens, topk)), torch.rand(tokens, topk)
    order, place, ends = steps.sort(ids, experts)
    for one, other in zip((order, place, ends), mixture_steps.sort(ids, experts), strict=True):
        assert torch.equal(one.long(), other.long()), "sort"
    worst, x = 0.0, torch.randn(tokens, 2 * K).bfloat16()
    routed, found = steps.route(x[:, :K].contiguous(), ids, experts, mode, dtype)
    assert all(torch.equal(a.long(), b.long()) for a, b in zip(found, (order, place, ends), strict=True)), "route"
    pairs = [
        (routed, mixture_steps.gather(x[:, :K].contiguous(), order, topk, mode, dtype)),
        (steps.gather(x[:, :K].contiguous(), order, topk, mode, dtype),
         mixture_steps.gather(x[:, :K].contiguous(), order, topk, mode, dtype)),
        (steps.activate(x, "silu", mode, dtype), mixture_steps.activate(x, "silu", mode, dtype)),
    ]  # fmt: skip
    for (q, scale), (wanted, factors) in pairs:
        worst = max(worst, differ(q, wanted))
        if factors is not None and mode in MX_MODES:
            scale, factors = (spread(each, powers_of(mode), q.shape[0], K) for each in (scale, factors))
        assert factors is None or (scale is not None and torch.allclose(scale, factors, rtol=1e-5)), "factors"
    y = torch.randn(tokens * topk, K).bfloat16()
    combined = steps.combine(y, place, ends, weights, torch.bfloat16)
    wanted = mixture_steps.combine(y, place, ends, weights, torch.bfloat16)
    assert torch.allclose(combined.float(), wanted.float(), rtol=2e-2, atol=2e-2), "combine"
    return worst


def open_device(emulator: str, checkout: str, arch: str) -> Any:
    """The emulator's device, for which it is no fault to set the mode of fp16.

    A compiler sets it before a conversion to fp8, so that what is beyond fp8's range becomes the end of it. Here
    nothing is beyond it, and nothing is of fp16.
    """
    sys.path.insert(0, emulator)
    import emu_hip  # type: ignore[import-not-found]

    find = emu_hip.native_op

    def native_op(instruction: Any, architecture: str) -> Any:
        try:
            return find(instruction, architecture)
        except NotImplementedError as error:
            if "hwreg(1)" not in str(error):
                raise
            return emu_hip.N_NOP, {}

    emu_hip.native_op = native_op
    return emu_hip.EmulatedDevice(checkout, arch)


def main() -> int:
    emulator, checkout, arch, cache = sys.argv[1:]
    torch.manual_seed(0)
    target = load_target(arch)
    gpu = Emulated(open_device(emulator, checkout, arch), target, ArtifactCache(Path(cache)))
    # The emulator does not know gfx950's conversion to OCP's fp8.
    fp8 = [torch.float8_e4m3fnuz] if target.fp8 == "fnuz" else []
    found = {
        f"{dtype} {granularity} {m}": quantised(gpu, dtype, granularity, m)
        for dtype in (*fp8, torch.int8)
        for granularity in ("tensor", "row", "block")
        for m in (1, 45)
    }
    found["mixture"] = mixture(gpu, torch.bfloat16, "")
    found |= {f"mixture {dtype} {mode}": mixture(gpu, dtype, mode) for dtype in fp8 for mode in ("row", "block")}
    found["mixture int8 row"] = mixture(gpu, torch.int8, "row")
    found |= {f"mixture fp4 {mode}": mixture(gpu, torch.uint8, mode) for mode in MX_MODES}
    for what, share in found.items():
        print(f"{what}: {share:.2g} differ")
    print(f"{gpu.launches} launches, races {gpu.races}")
    # What is activated and then rounded may fall on the other side of a step, as exp is another one here.
    return int(max(found.values()) > 0.002)


if __name__ == "__main__":
    sys.exit(main())
