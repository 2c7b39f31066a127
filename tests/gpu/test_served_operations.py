import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.cpu.contracts.test_served_operations import CASES, KINDS
from tests.gpu.here import fp8, graph_of, needs_gpu, normal, record, replayed, triton
from tests.support import shipped
from tests.support.nouns import Config, Dispatcher, Family, Machine, Patch, Problem, Record, Target, matrices, registry
from tests.support.operation_calls import CALLS, Rows, parts
from tests.support.products import product
from tests.support.tuned_calls import make_call
from tritongemm.hip_ext import machine
from tritongemm.numerics import epilogues, verify
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.serving import added_operations, server_calls
from tritongemm.serving.linear_fp8 import BlockOperands
from tritongemm.serving.quantize import own_fp8

ROW, RANGE = Config("tile", 16, 64, 128, 1, 1, 4, 2), Config("tile", 32, 64, 128, 1, 2, 4, 3)
GROUPS = Config("grouped", 16, 64, 128, 1, 1, 4, 2)


def rows_of(of: Problem, target: Target) -> list[Record]:
    """A row in this GPU's fp8, and one of a range of M where a binary can serve that; none where it is not computed."""
    if "fp8e4m3fn" in (of.a.dtype, of.b.dtype) and of.a.scaling and of.a.scaling.dtype == "fp32":
        of = replace(of, a=of.a._replace(dtype=fp8(target)), b=of.b._replace(dtype=fp8(target)))
    config = GROUPS if of.groups else ROW
    if not registry.get(Family, of.family).supports(of, target) or not triton().check(config, of, target):
        return []
    has_range = not of.groups and of.a.row_major and triton().check(RANGE, of.at(64), target)
    return [record(of, config), *([record(of.at(64), RANGE, m_from=17)] if has_range else [])]


def assert_right(of: Problem, out: torch.Tensor, exact: torch.Tensor) -> None:
    there = ~exact[..., 0].isnan()
    assert verify.deviation(out[there], exact[there]) <= registry.get(Family, of.family).tolerance(of)


@pytest.mark.parametrize("of", CASES.values(), ids=CASES)
def test_it_is_served_at_its_own_m_and_at_others(gpu_machine: Machine, dispatcher: Dispatcher, of: Problem) -> None:
    """Eager, and replayed on other numbers: by its row, a row of a range of M, that of another M, or by PyTorch."""
    rows, arch = rows_of(of, gpu_machine.target), gpu_machine.target.name
    if not rows:
        pytest.skip(f"{arch} does not compute it")
    of = rows[0].problem
    call, _, exact = make_call(of, "cuda")
    there = ~exact[..., 0].isnan()
    assert verify.deviation(call()[there], exact[there]) < 0.05, "PyTorch's"
    assert tritongemm.load(rows) == len(rows)
    kinds = {of.m: "near"} if of.groups else {of.m: "exact", 17: "range", 64: "exact"} if rows[1:] else {of.m: "exact"}
    for m in (7, 100) if not of.groups else ():
        if serves_other_m(of.at(m), arch) or of.epilogue == "none":
            kinds[m] = "near" if serves_other_m(of.at(m), arch) else "fallback"
    for m, kind in kinds.items():
        here = of if m == of.m else of.at(m)
        (call, own, exact), (_, others, other_exact) = make_call(here, "cuda"), make_call(here, "cuda", seed=5)
        said = tritongemm.explain(call.name, *call.given, **call.named)
        assert said.startswith(f"{kind}: "), said
        assert_right(here, call(), exact)
        graph, out = graph_of(call)
        for name, operand in own.items():
            operand.copy_(others[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_right(here, out, other_exact)


@pytest.fixture
def kinds(gpu_machine: Machine, dispatcher: Dispatcher) -> list[Problem]:
    """A problem of each kind that is computed here, whose rows are loaded."""
    rows = [found for name in KINDS if (found := rows_of(CASES[name], gpu_machine.target))]
    tritongemm.load([one for found in rows for one in found])
    return [found[0].problem for found in rows]


def test_one_compiled_graph_serves_every_m(kinds: list[Problem]) -> None:
    torch._dynamo.reset()
    first = [make_call(of, "cuda")[0] for of in kinds]

    def compute(given: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [call(*tensors) * 2 for call, tensors in zip(first, given, strict=True)]

    compiled = torch.compile(compute, fullgraph=True, dynamic=True)
    for m in (16, 40, 100):
        calls = [make_call(of.at(m), "cuda") for of in kinds]
        for of, (_, _, exact), out in zip(kinds, calls, compiled([call.tensors for call, *_ in calls]), strict=True):
            assert_right(of.at(m), out / 2, exact)


def test_threads_have_launches_of_their_own(kinds: list[Problem]) -> None:
    calls = [(of, *make_call(of, "cuda")[::2]) for of in kinds]

    def work(_: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for of, call, exact in calls * 20:
                assert_right(of, call(), exact)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("scales", ["block", "block_tma"])
def test_a_servers_memory_is_written(
    gpu_machine: Machine, dispatcher: Dispatcher, scales: str, monkeypatch: Patch
) -> None:
    """Where a row wants the factors of A padded, those that a server has dense are copied."""
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: True)
    rows = rows_of(product("a8w8_blockscale", 18, 384, 512, "fp8e4m3fn", scales), gpu_machine.target)
    if not rows:
        pytest.skip("no units of fp8")
    tritongemm.load(rows[:1])
    of = rows[0].problem
    call, _, exact = make_call(of, "cuda")
    a, b, of_a, of_b, *_ = call.tensors
    out = torch.full((of.m, of.n), torch.nan, dtype=torch.bfloat16, device="cuda")
    given = BlockOperands(a, b, of_b, of_a.t().contiguous().t(), out=out)
    for _ in range(2):
        assert server_calls.product_or(given, lambda: pytest.fail("not served")) is out
        assert_right(of, out, exact)
        out.fill_(torch.nan)
    graph, _ = graph_of(server_calls.product_or, given, lambda: pytest.fail("not served"))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(of, out, exact)


@pytest.mark.usefixtures("gpu_machine")
def test_gate_and_up_without_a_row_are_a_product_and_a_kernel(dispatcher: Dispatcher) -> None:
    x, w, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((3, 5, 256), (2 * 344, 256), (2 * 344,)))
    exact = epilogues.apply("silu_mul", torch.nn.functional.linear(x.double(), w.double(), bias.double()))
    act = tritongemm.linear_act
    outs = [act(x, w, "silu_mul", bias), replayed(act, x, w, "silu_mul", bias)]
    assert all(verify.deviation(out.double(), exact) < 0.03 for out in outs)
    q, factors = tritongemm.linear_act_quantize(x, w[:512], "silu_mul")
    plain = epilogues.apply("silu_mul", torch.nn.functional.linear(x.double(), w[:512].double()))
    assert verify.deviation(q.double() * factors.double().repeat_interleave(128, 1).view(q.shape), plain) < 0.1
    assert any(ready is added_operations._multiply_and_activate for ready in dispatcher.calls.table.values())


SWAPPED = (("swap_ab", 1),)
CONFIGS = (
    Config("tile", 64, 64, 128, 4, 2, 4, 2),
    Config("tma", 64, 128, 128, 8, 2, 4, 3),
    Config("tma", 32, 64, 128, 1, 4, 4, 3, (("poll", 1), *SWAPPED)),
    Config("tma", 128, 256, 128, 8, 1, 8, 3),
    Config("persistent", 128, 64, 128, 8, 1, 8, 3, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 128, 8, 1, 4, 3, (("share_more", 1),)),
    Config("ws_tma", 128, 128, 128, 8, 1, 8, 4, (("share", 2),)),
    Config("ws_tma", 128, 256, 128, 4, 1, 8, 3, (("epilogue_parts", 2),)),
    Config("ws_tma", 128, 256, 128, 4, 2, 8, 3, (("epilogue_parts", 2), ("pair", 1))),
    Config("ws_tma", 128, 192, 64, 4, 1, 8, 3, (("share", 1),)),
    Config("ws_tma", 256, 160, 64, 1, 1, 8, 4, (("epilogue_parts", 4),)),
    Config("ws_tma", 64, 80, 64, 1, 3, 4, 4),
    Config("ws_tma", 128, 112, 128, 2, 1, 8, 5, (("pair", 1),)),
    Config("ws_tma", 64, 32, 128, 1, 8, 4, 8),
    Config("ws_tma", 64, 64, 256, 1, 2, 4, 6, (("ahead", 4),)),  # blocks in two pieces
    Config("ws_tma", 64, 64, 256, 2, 1, 4, 5, (("pair", 1),)),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 8, SWAPPED),
    Config("ws_tma_swapped", 40, 64, 128, 1, 3, 4, 3, SWAPPED),
    Config("ws_tma_swapped", 256, 64, 64, 1, 1, 4, 3, SWAPPED),
    Config("ws_tma_swapped", 136, 128, 64, 4, 1, 8, 4, (("epilogue_parts", 4), *SWAPPED)),
)


def large(rows: int, k: int) -> torch.Tensor:
    """Numbers whose sums are far beyond the 2 ** 24 up to which float32 holds each integer."""
    return torch.randint(90, 128, (rows, k), device="cuda", dtype=torch.int8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("size", [(300, 528, 16400), (7, 272, 16400)])
def test_sums_are_exact_beyond_float32(gpu_machine: Machine, config: Config, size: tuple[int, int, int]) -> None:
    problem = Problem(*size, *matrices("int8", c="int32", layout="TN"))
    if not triton().check(config, problem, gpu_machine.target):
        pytest.skip(f"{gpu_machine.target.name} has no {config.template}")
    a, w = large(size[0], size[2]), large(size[1], size[2])
    exact = (a.double() @ w.double().T).to(torch.int64)
    assert exact.min() > 2**26
    mine = Dispatcher()
    assert mine.load([record(problem, config)]) == 1
    for _ in range(3):  # counters and flags of cut tiles are as they were
        assert torch.equal(mine.run(a, w, None, torch.int32).long(), exact)
    assert str(mine.explain(a, w, None, torch.int32)).startswith("exact")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_scales_multiply_the_exact_sum(gpu_machine: Machine, config: Config, dispatcher: Dispatcher) -> None:
    """Factors are powers of two and sums multiples of 64 below 2 ** 30: float32 has every bit of the result."""
    m, n, k = 300, 528, 4096
    problem = registry.get(Family, "a8w8").problem(Problem(m, n, k, *matrices("int8", c="fp32", layout="TN")))
    if not triton().check(config, problem, gpu_machine.target):
        pytest.skip(f"{gpu_machine.target.name} has no {config.template}")
    a, w = (large(rows, k) // 8 * 8 for rows in (m, n))
    of_a = torch.randint(-10, 11, (m,), device="cuda").float().exp2()
    of_b = torch.randint(-10, 11, (n,), device="cuda").float().exp2()
    exact = (a.double() @ w.double().T) * of_a[:, None].double() * of_b[None, :].double()
    assert dispatcher.load([record(problem, config)]) == 1
    assert torch.equal(tritongemm.scaled_mm(a, w, of_a, of_b, out_dtype=torch.float32).double(), exact)
    assert tritongemm.explain("scaled_mm", a, w, of_a, of_b, out_dtype=torch.float32).startswith("exact")


# PyTorch's own products of eight bits convert the weight or make a factor, and a factor of all numbers is written.
LAUNCHING = ("mm fp8", "mm int8", "gemm_a16w16 scaled", "quantize tensor")


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_no_rows_give_an_empty_result_and_launch_nothing(name: str) -> None:
    """A graph that is captured of a call has nothing in it, of which PyTorch warns."""
    fp8 = own_fp8(torch.device("cuda", 0))
    call = CALLS[name](Rows(0, "cuda", fp8))
    wanted = [(t.shape, t.dtype) for t in parts(CALLS[name](Rows(0, fp8=fp8))())]
    found = parts(call())
    assert [(t.shape, t.dtype) for t in found] == wanted and all(t.is_cuda for t in found)
    with warnings.catch_warnings(record=True) as warned, torch.cuda.graph(torch.cuda.CUDAGraph()):
        warnings.simplefilter("always")
        again = parts(call())
    assert [(t.shape, t.dtype) for t in again] == wanted
    assert name in LAUNCHING or any("CUDA Graph is empty" in str(one.message) for one in warned)


def test_a_product_is_loaded_by_its_first_call(
    gpu_machine: Machine, dispatcher: Dispatcher, tmp_path: Path, monkeypatch: Patch
) -> None:
    gbps = machine.memory_gbps(gpu_machine)
    assert gbps == pytest.approx(gpu_machine.target.hbm_gbps, rel=0.05), "the driver's and the data sheet's"
    shipped.ship(tmp_path, monkeypatch, [(gpu_machine.product, gbps), ("NVIDIA Other", 100)], most=6)
    x, w = normal(5, shipped.K), normal(shipped.N, shipped.K)
    report = f"{tritongemm.load('shipped')}"
    assert report.startswith("3 of 6 rows serve cuda:0") and report.endswith(f"3 for memory of 100 GB/s, not {gbps}")
    device = dispatcher.device(0)
    assert device is not None and device.waiting and not device.loaded_ranges
    torch.nn.functional.linear(x, w)  # the library starts before the capture
    graph, captured = graph_of(tritongemm.mm, x, w)
    assert device.waiting, "nothing is loaded while a graph is captured"
    graph.replay()
    served = tritongemm.mm(x, w)
    expected = (x.double() @ w.double().T).bfloat16()
    for result in (captured, served):
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.1)
    assert not device.waiting and tritongemm.explain(x, w).startswith("range: ")
    assert tritongemm.explain(x.repeat(12, 1), w).startswith("library: ")
