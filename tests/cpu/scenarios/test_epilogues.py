from dataclasses import replace

import pytest
import torch

from tests.support import ROOT, forked
from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import GFX942, SM90
from tests.support.lent_processes import LentProcess
from tests.support.nouns import Config, Groups, Operand, Problem, apart, matrices, refuses, registry, space, verify
from tritongemm.plugins.contracts import Family, KernelBackend, LibraryBackend
from tritongemm.search.pruning.prune import prune

POINTERS = [
    Config("tile", 16, 32, 16, 2, 2),
    Config("tile", 16, 16, 32, options=(("swap_ab", 1), ("poll", 1)), split_k=2),
    Config("gemv", 1, 16, 128, num_warps=2),
    Config("gemv", 2, 8, 128, split_k=2, num_warps=2),
    Config("gemv", 1, 2, 128, num_warps=2),
]
STREAMED = Config("stream_k", 16, 32, 16, options=(("num_sms", 3),))
DESCRIBED = [
    Config("tma", 16, 32, 16, 2, 2),
    Config("persistent", 16, 64, 16, 1, options=(("epilogue_parts", 2),)),
    Config("persistent", 16, 32, 16, 1),
]


@apart(
    ("silu_mul", "none", [*POINTERS, STREAMED]),
    ("gelu_tanh_mul", "n", [*POINTERS[:3], STREAMED]),
    ("gelu_mul", "m", [*POINTERS, STREAMED]),
    ("relu", "n", [*POINTERS, STREAMED]),
    ("gelu", "n", POINTERS[:3]),
)
def test_pointer_templates(epilogue: str, bias: str, configs: list[Config], /, interpreted: Interpreted) -> None:
    """Each template computes gated and plain products, with a bias along each side; activations are the same in all."""
    interpreted.check(Problem(19, 48, 37, *matrices(layout="TN"), bias=bias, epilogue=epilogue), configs, GFX942)


@pytest.mark.parametrize("epilogue", ["silu_mul", "silu"])
def test_descriptor_templates(interpreted: Interpreted, epilogue: str) -> None:
    interpreted.check(Problem(19, 80, 40, *matrices("bf16", layout="TN"), epilogue=epilogue), DESCRIBED, SM90)


def test_scaled_products_blocks_and_residuals_have_them(interpreted: Interpreted) -> None:
    plain = Problem(18, 48, 48, *matrices("int8", c="bf16", layout="TN"), bias="n", epilogue="silu_mul")
    interpreted.check(registry.get(Family, "a8w8").problem(plain), POINTERS, GFX942)
    of_c = "fp8e4m3fn"
    gated = Problem(19, 768, 37, *matrices("bf16", c=of_c, layout="TN"), bias="n", epilogue="silu_mul_block")
    interpreted.check(gated, IN_BLOCKS, SM90)
    plain = Problem(19, 384, 40, *matrices("bf16", c=of_c, layout="TN"), epilogue="block")
    configs = [Config("persistent", 16, 256, 16, 1, options=(("epilogue_parts", 2),)), Config("tma", 16, 128, 16, 2)]
    interpreted.check(plain, [*configs, *IN_BLOCKS[:1]], SM90)
    family, wide = registry.get(Family, "a8w8_blockscale"), Config("tile", 16, 256, 32, split_k=2)
    of = Problem(19, 768, 160, *matrices("int8", c="fp8e4m3fn", layout="TN"), epilogue="silu_mul_block")
    interpreted.check(family.problem(of), [wide], SM90)
    few = replace(of, m=3, c=Operand("bf16"), epilogue="silu_mul")
    interpreted.check(family.problem(few), [wide, Config("gemv", 1, 256, 128, num_warps=2)], SM90)
    bf16 = Problem(19, 80, 40, *matrices("bf16", layout="TN"), epilogue="add")
    interpreted.check(bf16, [*POINTERS, STREAMED, *DESCRIBED], SM90)
    interpreted.check(replace(bf16, k=37, n=48), POINTERS[1:4:2], GFX942)
    refuses("a matrix is added, and no bias", replace, bf16, bias="n")


def test_refusals() -> None:
    odd = Problem(4, 24, 32, epilogue="silu_mul")
    assert "8 columns of gate, then 8 of up" in str(registry.get(Family, "dense").supports(odd, SM90))
    refuses("epilogue must be one of none, silu", Problem, 4, 32, 32, epilogue="swish")
    for groups, changes, says in (
        (Groups(4, 8), {}, "not the epilogue silu_mul"),
        (Groups(4), {"n": 33}, "N is 33, but must be even"),
        (Groups(4), {"epilogue": "add"}, "not the epilogue add"),
    ):
        of_groups = replace(Problem(4, 32, 32, epilogue="silu_mul", groups=groups), **changes)
        assert says in str(registry.get(Family, "dense").supports(of_groups, SM90))
    integers = Problem(4, 32, 32, *matrices("int8", c="int32"), epilogue="relu")
    assert "into a C of int32" in str(registry.get(Family, "dense").supports(integers, SM90))


IN_BLOCKS = [
    Config("tile", 16, 256, 16, split_k=2),
    Config("tile", 16, 256, 16, options=(("swap_ab", 1),)),
    Config("stream_k", 16, 256, 16, options=(("num_sms", 3),)),
]


@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_block"])
def test_the_baseline_is_a_product_and_a_kernel(monkeypatch: pytest.MonkeyPatch, epilogue: str) -> None:
    """Here without what torch.compile makes of the second step."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    family, torchs = registry.get(Family, "dense"), registry.get(LibraryBackend, "torch")
    of_c = "fp8e4m3fn" if "block" in epilogue else "bf16"
    problem = Problem(5, 256, 64, *matrices("bf16", c=of_c, layout="TN"), bias="n", epilogue=epilogue)
    problem = replace(problem, bias="none") if "block" in epilogue else problem
    operands = family.make_inputs(problem, "cpu")
    c = operands["c"] = torch.empty(problem.operands["c"].extents, dtype=getattr(torch, problem.c.type.torch))
    assert torchs.supports(problem, SM90) and not torchs.torch_function(problem)
    call = torchs.operation(problem, operands)
    assert call is not None and call() is c
    assert not verify.library_fault(problem, verify.compare(problem, family, c, family.reference(problem, operands)))


@apart((1, "silu_mul", 1), (512, "silu_mul_block", 1), (64, "silu_mul", 8))
def test_what_can_not_compute_an_epilogue_is_pruned(m: int, epilogue: str, groups: int, /) -> None:
    of_c, triton = "fp8e4m3fn" if "block" in epilogue else "bf16", registry.get(KernelBackend, "triton")
    problem = Problem(m, 3072, 1024, *matrices("bf16", c=of_c, layout="TN"), epilogue=epilogue)
    problem = problem if groups == 1 else replace(problem, groups=Groups(groups))
    kept = prune(space(problem, SM90), problem, SM90).kept
    assert kept and all(triton.check(config, problem, SM90) for config in kept[::7])


STEP_AND_FORMULAS = """
import torch
from tritongemm.backends.torch.quantised_step import quantise
from tritongemm.numerics import epilogues
fp8 = torch.finfo(torch.float8_e4m3fn)
torch.finfo = lambda _: fp8  # of float32, in which it is interpreted
for epilogue in ("block", "silu_mul_block", "gelu_block", "gelu_tanh_mul_block", "relu_block"):
    run = 256 if "tanh" in epilogue else 8  # of groups, and of one product
    made = torch.randn(13, 512)
    wanted = epilogues.apply(epilogue, made, run)
    rows, factors = torch.empty_like(wanted), torch.empty(wanted.shape[1] // 128, 13)
    quantise(epilogue, run, made, rows, factors)
    torch.testing.assert_close(rows * factors.T.repeat_interleave(128, 1), wanted, rtol=1e-5, atol=1e-5)
    assert rows.abs().max() <= 448.001
print("alike")
"""


def test_the_second_step_of_blocks_is_what_formulas_say(interpreter: LentProcess) -> None:
    ran = forked.interpreted(interpreter, ["-c", STEP_AND_FORMULAS], ROOT)
    assert ran.stdout == "alike\n", ran.stderr[-3000:]
