import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional

import tritongemm
from tests.gpu.here import graph_of, needed_fp8, normal, record, replayed, triton
from tests.gpu.test_numeric import verify_all
from tests.support.nouns import BuildPool, Config, Family, Groups, Machine, Operand, Patch, Problem, matrices, registry
from tests.support.products import product
from tests.support.tuned_calls import make_call
from tritongemm.build.few_expert_kernels import SCALES
from tritongemm.cli import tune
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.numerics import verify
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.serving import mixtures
from tritongemm.serving.mixtures import MoeKernels

COUNTS = (7, 0, 133, 1, 0, 64, 20, 3)
CONFIGS = (
    Config("grouped", 16, 64, 64, 1, 1, 4, 2, (("per_unit", 1),)),
    Config("grouped", 64, 128, 128, 4, 1, 4, 2, (("per_unit", 2),)),
    Config("grouped", 16, 64, 128, 1, 1, 4, 2, (("swap_ab", 1),)),
    Config("grouped", 32, 256, 64, 2, 1, 8, 2, (("xcds", 8),)),
    Config("grouped_tma", 16, 64, 128, 1, 1, 4, 4, (("per_unit", 2), ("swap_ab", 1))),
    Config("grouped_tma", 64, 128, 128, 2, 1, 4, 3, (("per_unit", 1),)),
    Config("grouped_tma", 128, 128, 128, 4, 1, 8, 3, (("per_unit", 1),)),
    Config("grouped_tma", 64, 256, 128, 1, 1, 8, 3),
    Config("grouped_gemv", 1, 1, 1024, 1, 1, 1, 1, (("early", 1),)),
    Config("grouped_gemv", 1, 4, 256, 1, 1, 2, 1),
    Config("grouped_tile", 16, 64, 128, 1, 1, 4, 3),
    Config("grouped_tile", 64, 128, 64, 16, 1, 4, 2),
    Config("grouped_ws_tma", 64, 64, 128, 1, 1, 4, 8),
    Config("grouped_ws_tma", 128, 128, 64, 4, 1, 8, 4),
    Config("grouped_ws_tma_swapped", 16, 64, 128, 1, 1, 4, 8, (("swap_ab", 1),)),
    Config("grouped_ws_tma_swapped", 32, 128, 64, 2, 1, 8, 6, (("swap_ab", 1),)),
    Config("grouped_ws_tma", 128, 128, 128, 4, 1, 8, 4),
    Config("grouped_ws_tma", 128, 128, 128, 2, 1, 8, 3, (("epilogue_parts", 2),)),
    Config("grouped_ws_tma", 64, 128, 128, 2, 1, 4, 4, (("adjacent", 1),)),  # adjacent programs
    Config("grouped_ws_tma", 192, 128, 128, 4, 1, 12, 3),
    Config("grouped_ws_tma", 256, 128, 128, 2, 1, 8, 3),  # in halves of rows
    Config("grouped_ws_tma", 256, 128, 128, 4, 1, 8, 4, (("epilogue_parts", 4),)),
    Config("grouped_ws_tma", 128, 256, 128, 1, 1, 8, 3, (("epilogue_parts", 4),)),
)

IN_BLOCKS = (
    Config("grouped", 16, 256, 128, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("grouped", 64, 256, 128, 2, 1, 8, 2),
    Config("grouped_tile", 16, 256, 128, 1, 1, 8, 3),
)


def problem(family: str, dtype: str, dtype_c: str, n: int, k: int, room: int = 0, scales: str = "") -> Problem:
    groups = Groups(len(COUNTS), room, "captured", COUNTS)
    return product(family, sum(COUNTS), n, k, f"{dtype} {dtype} {dtype_c}", scales, groups=groups)


@pytest.mark.parametrize("room", [0, 140])
@pytest.mark.parametrize("kind", ["dense", "fp8", "int8"])
def test_groups(gpu: GpuEvaluator, compiler: BuildPool, kind: str, room: int) -> None:
    """Products of integers without scales are right to the last bit, in kernels whose warps have roles too."""
    if kind == "dense":
        plain = problem("dense", "fp16", "fp16", 136, 256, room).stored(True, True)
        problems = [*(problem("dense", "bf16", "bf16", n, k, room) for n, k in ((71, 203), (256, 512))), plain]
    else:
        dtype = needed_fp8(gpu.target) if kind == "fp8" else kind
        problems = [
            problem("a8w8", dtype, "bf16", 272, 400, room),
            problem("a8w8_blockscale", dtype, "bf16" if kind == "fp8" else "fp32", 400, 640, room),
        ]
        problems += [problem("dense", dtype, "int32", 272, 400, room)] if kind == "int8" else []
    verify_all(gpu, compiler, problems, CONFIGS)


def test_groups_of_gate_and_up(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    """Columns of up are behind all of gate's; results are quantised too."""
    e4m3 = needed_fp8(gpu.target)
    problems = [
        replace(problem("dense", "bf16", "bf16", n, k), epilogue=name)
        for n, k, name in ((272, 203, "silu_mul"), (512, 512, "gelu_tanh_mul"), (71, 64, "silu"))
    ]
    scaled = problem("a8w8_blockscale", e4m3, "bf16", 768, 640)
    problems += [replace(problem("a8w8", e4m3, "bf16", 272, 400), epilogue="silu_mul")]
    problems += [replace(scaled, epilogue="silu_mul"), gated_in_blocks(scaled)]
    verify_all(gpu, compiler, problems, (*CONFIGS, *IN_BLOCKS))


def gated_in_blocks(scaled: Problem) -> Problem:
    return replace(scaled, epilogue="silu_mul_block", c=Operand(scaled.a.dtype))


@pytest.mark.parametrize(("mode", "slower"), [("", 1.0), ("block", 1.0), ("block", 1.5)])
def test_a_mixture_of_four_kernels(gpu_machine: Machine, mode: str, slower: float) -> None:
    """Gate and up with their activation where its row is not slower; an expert without rows, and rows of no expert."""
    torch.manual_seed(0)
    tokens, experts, topk, hidden, inner = 12, 6, 2, 256, 384
    x, weights = normal(tokens, hidden), torch.rand(tokens, topk, device="cuda")
    w1, w2 = normal(experts, 2 * inner, hidden) / hidden**0.5, normal(experts, hidden, inner) / inner**0.5
    ids = torch.randint(-1, experts - 1, (tokens, topk), device="cuda", dtype=torch.int32)
    scales: list[torch.Tensor | None] = [None, None]
    dtype = needed_fp8(gpu_machine.target) if mode else "bf16"
    if mode:
        (w1, scales[0]), (w2, scales[1]) = (quantised(w, mode, torch.float8_e4m3fn) for w in (w1, w2))
    given = MixtureOperands(x, w1, w2, weights, ids, "silu", scales[0], scales[1])
    five = tritongemm.fused_moe(*given[:8])
    first = registry.get(Family, "a8w8_blockscale" if mode else "dense").problem(
        Problem(tokens * topk, 2 * inner, hidden, *matrices(dtype, c="bf16", layout="TN"), groups=Groups(experts))
    )
    gated = gated_in_blocks(first) if mode else replace(first, epilogue="silu_mul")
    config = IN_BLOCKS[0] if mode else CONFIGS[0]
    tritongemm.load([record(first, config, seconds=1e-5), record(gated, config, seconds=slower * 1e-5)])
    steps = mixtures.steps_for(*given)
    assert isinstance(steps, MoeKernels)
    assert steps.act_of(MIXTURE.check(given)) == (gated.epilogue if slower == 1.0 else "")
    tritongemm.fused_moe(*given[:8])
    torch.testing.assert_close(replayed(tritongemm.fused_moe, *given[:8]), five, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", ["dense", "a8w8_blockscale"])
def test_groups_are_tuned_and_served(gpu_machine: Machine, tmp_path: Path, family: str) -> None:
    dtype = "bf16" if family == "dense" else "fp8"
    if dtype == "fp8":
        needed_fp8(gpu_machine.target)
    out = tmp_path / "out.yaml"
    argv = ["-m", "100", "-n", "512", "-k", "256", "-col_b", "--groups", "8", "--spread", "skewed", "--family", family]
    assert tune.main([*argv, "-dtype_a", dtype, "--budget", "24", "--libtype", "triton", "-o", str(out)]) == 0
    (row,) = yaml.safe_load(out.read_text())
    assert row["error"] <= row["tolerance"] and row["groups"] == 8 and row["group_spread"] == "skewed"
    tritongemm.load(out)
    for m, spread in ((100, "uniform"), (1, "uniform"), (260, "skewed")):
        groups = Groups(8, spread=spread)
        plain = Problem(m, 512, 256, *matrices(row["dtype_a"], c="bf16", layout="TN"), groups=groups)
        numbers = registry.get(Family, family)
        call, operands, exact = make_call(asked := numbers.problem(plain), "cuda")
        assert verify.deviation(call(), exact) <= numbers.tolerance(asked)
        graph, c = graph_of(call)
        operands["offsets"].copy_(torch.tensor([0] * 7 + [m], dtype=torch.int32, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert verify.deviation(c, numbers.reference(asked, operands)) <= numbers.tolerance(asked)


def test_a_servers_table_of_experts_is_written(gpu_machine: Machine, tmp_path: Path) -> None:
    """Both products of a layer, and the config that is fastest at them together, by the name that vLLM looks up."""
    needed_fp8(gpu_machine.target)
    name = "E=8,N=256,device_name=any,dtype=fp8_w8a8,block_shape=[128,128].json"
    size = ["--for", "vllm", "--groups", "8", "--top_k", "2", "-n", "256", "-k", "512", "-m", "16"]
    run = ["--family", "a8w8_blockscale", "--budget", "16", "-o", str(tmp_path / name)]
    assert tune.main([*size, *run]) == 0
    (written,) = tmp_path.glob("E=8,N=256,device_name=*,dtype=fp8_w8a8,block_shape=[[]128,128].json")
    table = json.loads(written.read_text(encoding="utf-8"))
    assert len(table) == 18 and set(table["16"]) >= {"BLOCK_SIZE_M", "GROUP_SIZE_M", "num_warps", "num_stages"}


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.template != "grouped"], ids=lambda c: c.name)
def test_each_kernel_is_served(gpu_machine: Machine, config: Config) -> None:
    """Groups whose rows are no multiple of a tile's: the rows of others stay as they are."""
    dtype = needed_fp8(gpu_machine.target)
    family = registry.get(Family, "a8w8_blockscale")
    asked = problem("a8w8_blockscale", dtype, "bf16", 512, 256)
    if not triton().check(config, asked, gpu_machine.target):
        pytest.skip("not for this GPU, or not for these scales")
    assert tritongemm.load([record(asked, config)]) == 1
    for seed in range(2):
        call, _, exact = make_call(asked, "cuda", seed)
        assert verify.deviation(call(), exact) <= family.tolerance(asked)


@pytest.mark.parametrize("mode", ["", "row", "row int8", "block", "mx", "mx_shuffled", "mx fp4"])
@pytest.mark.parametrize(("tokens", "alone"), [(1, False), (77, False), (1, True), (13, True)])
def test_a_mixture_of_experts(gpu_machine: Machine, monkeypatch: Patch, mode: str, tokens: int, alone: bool) -> None:
    """Against the same in float32, expert by expert; captured, compiled, and with ids of no expert.

    `alone`: by the two kernels for few tokens, where they read such weights.
    """
    monkeypatch.setattr(MoeKernels, "_rows_are_alone", lambda _, checked: alone and checked.mode in SCALES)
    torch.manual_seed(0)
    experts, topk, hidden, inner = 6, 3, 256, 384
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    w1 = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    w2 = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    weights = torch.rand(tokens, topk, device="cuda")
    ids = torch.randint(-1, experts + 1, (tokens, topk), device="cuda", dtype=torch.int32)
    exact = torch.zeros(tokens, hidden, device="cuda")
    for expert in range(experts):
        gate, up = (x.float() @ w1[expert].float().T).chunk(2, 1)
        share = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
        exact += share * ((functional.silu(gate) * up) @ w2[expert].float().T)
    scales: list[torch.Tensor | None] = [None, None]
    layout = "e8m0_32x8" if mode == "mx_shuffled" else ""
    if mode.startswith("mx"):
        dtype = torch.uint8 if mode == "mx fp4" else torch.float8_e4m3fn
        pairs = [[tritongemm.quantize(one, "mx", dtype, layout or "rows") for one in w] for w in (w1, w2)]
        w1, w2 = (torch.stack([q for q, _ in each]) for each in pairs)
        scales = [torch.stack([powers for _, powers in each]) for each in pairs]
    elif mode:
        dtype = torch.int8
        if mode != "row int8":
            dtype = torch.float8_e4m3fnuz if needed_fp8(gpu_machine.target).endswith("uz") else torch.float8_e4m3fn
        (w1, scales[0]), (w2, scales[1]) = (quantised(w, mode, dtype) for w in (w1, w2))

    def compute() -> torch.Tensor:
        return tritongemm.fused_moe(x, w1, w2, weights, ids, "silu", *scales, scale_layout=layout)

    limit = 0.4 if mode == "mx fp4" else 0.08 if mode else 0.02
    norm = exact.norm().clamp_min(1e-3)
    assert (compute().float() - exact).norm() / norm < limit
    assert (torch.compile(compute)().float() - exact).norm() / norm < limit
    if alone:
        captured = replayed(lambda: [compute() for _ in range(3)])
        assert all(torch.equal(one, compute()) for one in captured)


def quantised(w: torch.Tensor, mode: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    most, wide = 127 if dtype == torch.int8 else torch.finfo(dtype).max, w.float()
    if mode.startswith("row"):
        scale = wide.abs().amax(-1) / most
        numbers = wide / scale[..., None]
        return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale
    scale = wide.view(w.shape[0], w.shape[1] // 128, 128, -1, 128).abs().amax((2, 4)) / most
    return (wide / scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(dtype), scale
