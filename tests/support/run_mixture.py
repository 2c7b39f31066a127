"""Compute mixtures of experts by `fused_moe` with all its kernels in Triton's interpreter, and compare with float64.

usage: TRITON_INTERPRET=1 python -m tests.support.run_mixture FOLDER fp8|fp4
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernel_cases import MX_GROUPED, SM90
from tests.support.mixtures import FP4, FP8, SHUFFLED, Mixture
from tests.support.nouns import Family, Operand, registry, verify
from tritongemm.codegen import modules
from tritongemm.core.scaling import powers_of
from tritongemm.measure.guarded_operands import guarded
from tritongemm.measure.interpreting import mend_interpreter
from tritongemm.operations import mixture_steps
from tritongemm.operations.contract import Reading
from tritongemm.operations.factors import spread
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.scaled import numbers
from tritongemm.serving import mixtures
from tritongemm.serving.mixtures import MoeKernels

CONFIG = MX_GROUPED[0]


class InterpretedSteps(MoeKernels):
    """The steps between the products, each beside what PyTorch's operations give."""

    def __init__(self) -> None:
        super().__init__(None, {})  # type: ignore[arg-type]

    def _run(self, choose: Any, asked: tuple[Any, ...], operands: dict[str, Tensor]) -> bool:
        helper, given = choose(*asked)
        assert list(operands) == list(helper.pointers)
        module = modules.run_text(helper.source, "experts")
        bounded = {name: guarded(tensor) for name, tensor in operands.items()}
        getattr(module, helper.name)[given.grid](*bounded.values(), *given.numbers.values(), **helper.constants)
        for name, tensor in operands.items():
            tensor.copy_(bounded[name])
        return True

    def gather(self, x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> Any:
        found, wanted = super().gather(x, order, topk, mode, dtype), mixture_steps.gather(x, order, topk, mode, dtype)
        return alike(found, wanted, mode, x.shape[1])

    def route(self, x: Tensor, ids: Tensor, experts: int, mode: str, dtype: torch.dtype) -> Any:
        given = x, ids, experts, mode, dtype
        (found, places), (wanted, wanted_places) = super().route(*given), mixture_steps.route(*given)
        assert all(torch.equal(one, other.int()) for one, other in zip(places, wanted_places, strict=True)), "places"
        return alike(found, wanted, mode, x.shape[1]), places

    def activate(
        self, h: Tensor, activation: str, mode: str, dtype: torch.dtype, bias: Any = None, run: int = 0,
        into: Any = None,
    ) -> Any:  # fmt: skip
        given = h, activation, mode, dtype, bias, run, into
        found, wanted = super().activate(*given), mixture_steps.activate(*given)
        return alike(found, wanted, mode, h.shape[1] // 2)


def alike(found: Any, wanted: Any, mode: str, k: int) -> Any:
    """What is wanted, which was found: the powers, and the numbers but for the interpreter's rounding of fp8."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    powers, wanted_powers = (spread(pair[1], powers_of(mode), found[0].shape[0], k) for pair in (found, wanted))
    there = ~wanted_powers.isnan()  # rows of no expert hold what was not computed
    assert torch.equal(powers.isnan(), ~there) and torch.equal(powers[there], wanted_powers[there]), "powers"
    ours, theirs = (numbers(pair[0])[there] for pair in (found, wanted))
    near = torch.isclose(ours, theirs, rtol=0.13, atol=2**-8) if found[0].dtype == FP8 else ours == theirs
    assert near.double().mean() > 0.9, "numbers"
    return wanted


class InterpretedProducts:
    def __init__(self, folder: Path) -> None:
        self._folder, self.worst = folder, 0.0

    def __call__(self, *operands: Any) -> Tensor:
        operands = GroupedOperands(*operands)
        reading = GROUPED.read(operands._replace(out_dtype=torch.bfloat16))
        assert isinstance(reading, Reading), reading
        problem, given = replace(reading.problems[0], c=Operand("fp32")), reading.tensors
        text = modules.write_candidates(problem, [CONFIG], SM90, self._folder).read_text(encoding="utf-8")
        module = modules.run_text(text, "generated")
        vars(module)["torch"] = torch
        c = torch.full((operands.a.shape[0], operands.b.shape[2]), float("nan"), dtype=operands.out_dtype)
        c = guarded(c)
        module.launch(CONFIG.name, c=c, **{name: guarded(tensor) for name, tensor in given.items()})
        family = registry.get(Family, problem.family)
        exact = family.reference(problem, dict(given))
        there = int(operands.offs[-1])
        self.worst = max(self.worst, verify.deviation(c[:there], exact[:there]) / family.tolerance(problem))
        return c


def main() -> int:
    mend_interpreter()
    products = InterpretedProducts(Path(sys.argv[1]))
    mixture = Mixture.make(FP8, "") if sys.argv[2] == "fp8" else Mixture.make(FP4, SHUFFLED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtures, "steps_for", lambda *_: InterpretedSteps())
        patch.setattr(mixtures, "run_grouped", products)
        found = mixture.compute()
    exact = mixture.exact()
    print(f"error {float((found - exact).norm() / exact.norm()):.1e}")
    torch.testing.assert_close(found, mixture.compute(), rtol=1e-3, atol=1e-3)
    print(f"worst product {products.worst:.1e} of the tolerance")
    return int(products.worst > 1)


if __name__ == "__main__":
    sys.exit(main())
