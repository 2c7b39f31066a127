"""Family a8w8_blockscale: every template multiplies the sums of 128 elements along K by the scales that are theirs."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import emulated
from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import GROUPED
from tests.support.nouns import Config, Family, KernelBackend, Operands, Problem, apart, heavy, matrices, registry
from tritongemm.codegen import template_facts
from tritongemm.numerics.verify import deviation
from tritongemm.search.pruning import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

FAMILY = registry.get(Family, "a8w8_blockscale")
SM90 = target_files.load_target("sm90")
OCP = "fp8e4m3fn"
PLAIN = FAMILY.problem(Problem(17, 144, 336, *matrices(OCP, c="bf16", layout="TN")))
CONFIGS = (
    Config("tile", 16, 64, 128, split_k=2), Config("tile", 32, 64, 64, 2, 3, options=(("poll", 1), ("swap_ab", 1))),
    Config("tile", 16, 256, 128), Config("gemv", 1, 128, 256), Config("gemv", 8, 64, 128, split_k=2),
    Config("stream_k", 16, 64, 128, 2, options=(("num_sms", 5),)),
    Config("tma", 16, 64, 128, 2, 2, options=(("swap_ab", 1),)),
    Config("persistent", 16, 32, 64, 2, options=(("epilogue_parts", 2),)),
    Config("stream_k_tma", 16, 64, 128, 2, options=(("num_sms", 5),)),
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "block": {"bias": "n"},
    "block_rows": {"m": 5},
    "group": {"dtype_a": "int8", "dtype_b": "int8", "dtype_c": "fp16", "bias": "m"},
    "group_rows": {"row_major_b": True, "dtype_c": "fp32"},
    "block_tma": {},
}


def of(scales: str, **changes: Any) -> Problem:
    return FAMILY.problem(Problem.from_json(PLAIN.to_json() | changes), scales)


@apart("block", *(heavy(s) for s in ("group", "block_tma", "block_rows", "group_rows")))
def test_every_template_applies_scales_along_k(scales: str, /, interpreted: Interpreted) -> None:
    problem = of(scales, **FORMS[scales])
    templates = {t for t in template_facts.names() if template_facts.kernel_template(t).interpreted}
    assert {t for t in templates if template_facts.reads_b(t, problem)} <= {c.template for c in (*CONFIGS, *GROUPED)}
    found = interpreted.errors(problem, CONFIGS, SM90)
    assert all(e * FAMILY.tolerance(problem) < 1e-3 for e in found.values()), found


def summed(problem: Problem, operands: Operands, bits: int) -> torch.Tensor:
    """C of one scale along K by a matrix unit that cuts 32 products and their sum so far to the bits of the largest."""
    products = operands["a"].double().unsqueeze(1) * operands["b"].double().mT
    total = torch.zeros(problem.m, problem.n, 1, dtype=torch.float64)
    for some in products.split(32, -1):
        terms = torch.cat((some, total), -1)
        step = torch.exp2(terms.abs().amax(-1, keepdim=True).log2().floor() - bits)
        total = ((terms / step).trunc() * step).sum(-1, keepdim=True)
    of_b = operands["scale_b"].double().repeat_interleave(128, 0).mT
    return total.squeeze(-1) * operands["scale_a"].double().mT * of_b


def test_the_tolerance_is_that_of_matrix_units_with_few_scales_along_k() -> None:
    """An H100's error was 0.0139 at 8192 x 7168 x 256 and 0.0097 with K = 128, cuBLASLt's own as well."""
    problem = of("block", m=32, n=512, k=128)
    assert FAMILY.tolerance(problem) > FAMILY.tolerance(replace(problem, k=256)) > 0.0139
    assert FAMILY.tolerance(replace(problem, k=7168)) == FAMILY.tolerance(replace(problem, k=2048)) < 0.012
    found = []
    for seed in range(2):
        operands = FAMILY.make_inputs(problem, "cpu", seed=seed)
        exact = FAMILY.reference(problem, operands)
        found.append([deviation(summed(problem, operands, bits), exact) for bits in (52, 13, 8)])
    assert max(row[0] for row in found) < 1e-12 and max(row[1] for row in found) < FAMILY.tolerance(problem) / 2
    assert min(row[2] for row in found) > FAMILY.tolerance(problem)


ARCHS, ROWS = ("gfx942", "gfx950", "sm80", "sm89", "sm90", "sm100"), (1, 64, 4096)
QUICK = list(zip(ARCHS, 2 * ROWS, strict=True))
OTHERS = [case for case in itertools.product(ARCHS, ROWS) if case not in QUICK]


@pytest.mark.parametrize(("arch", "m"), [*QUICK, *(heavy(*case) for case in OTHERS)])
def test_there_are_candidates_everywhere(arch: str, m: int) -> None:
    target = target_files.load_target(arch)
    dtype = {"fn": OCP, "fnuz": "fp8e4m3fnuz", "none": "int8"}[target.fp8]
    problem = of("", m=m, n=2112, k=7168, dtype_a=dtype, dtype_b=dtype)
    assert FAMILY.supports(problem, target)
    kept = prune.prune(space(problem, target), problem, target)
    assert {c.block_k for c in kept.kept if c.template != "gemv"} == {128} and not kept.skipped
    triton = registry.get(KernelBackend, "triton")
    assert all(triton.check(c, problem, target) for c in kept.kept[:: len(kept.kept) // 50 + 1])
    wide = replace(next(c for c in kept.kept if c.template == "tile"), block_k=256)
    assert "block_k must divide the 128 elements" in triton.check(wide, problem, target).reason


EMULATED = (
    Config("tile", 16, 32, 128, 2, 2, 2),
    Config("tile", 32, 16, 64, 1, 3, 2, 2, (("poll", 1), ("swap_ab", 1))),
    Config("tile", 64, 256, 128, num_warps=8),
    Config("gemv", 1, 8, 256, num_warps=1, num_stages=1),
    Config("gemv", 4, 8, 256, split_k=2, num_warps=4, num_stages=1),
    Config("stream_k", 32, 32, 128, 2, 1, 4, options=(("num_sms", 7),)),
)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("scales", [*FORMS, "tensor"])
def test_amd_kernels_run_in_an_emulator(tmp_path: Path, arch: str, scales: str) -> None:
    target = target_files.load_target(arch)
    fp8 = "fp8e4m3fnuz" if target.fp8 == "fnuz" else OCP
    if scales == "tensor":
        problem = registry.get(Family, "a8w8").problem(
            Problem(17, 144, 300, *matrices(fp8, c="bf16"), bias="n"), scales
        )
    else:
        problem = of(scales, **{"dtype_a": fp8, "dtype_b": fp8, **FORMS[scales], "m": 17, "k": 300, "dtype_c": "bf16"})
    emulated.run_configs(tmp_path, problem, EMULATED, target)
