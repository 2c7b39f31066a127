import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.gpu.here import DENSE, TMA, VENDOR, needs_gpu, record, replayed
from tests.support.nouns import Config, LibraryBackend, Patch, Problem, matrices, registry, verify
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.record_table import RecordTable

pytestmark = [needs_gpu, pytest.mark.usefixtures("inference")]


def problem(m: int, n: int, k: int, bias: str = "none", c: str = "bf16") -> Problem:
    return Problem(m, n, k, *matrices("bf16", c=c, layout="TN"), bias=bias)


CASES = {
    "tile": (problem(128, 256, 512), Config("tile", 64, 64, 64, 8, 1, 4, 3)),
    "tile, odd sizes and a bias": (problem(33, 200, 136, "n"), Config("tile", 32, 64, 32, 4, 1, 4, 2)),
    "tile, K of no use for wide loads": (problem(7, 100, 99, "n"), Config("tile", 16, 64, 32, 1, 1, 4, 2)),
    "tile, float32 result": (problem(100, 128, 256, c="fp32"), Config("tile", 64, 64, 64, 8, 1, 4, 3)),
    "split": (problem(7, 256, 1024), Config("tile", 16, 64, 64, 1, 4, 4, 3)),
    "split, bias": (problem(100, 328, 2048, "n"), Config("tile", 32, 64, 64, 1, 3, 4, 3)),
    "swap": (problem(5, 512, 1024, "n"), Config("tile", 16, 64, 128, 1, 2, 4, 3, (("swap_ab", 1),))),
    "stream-K": (problem(300, 1100, 1000, "n"), Config("stream_k", 64, 64, 64, 8, 1, 4, 3)),
    "gemv": (problem(1, 1000, 2048, "n"), Config("gemv", 1, 4, 1024, 1, 1, 4, 2)),
    "split, started early": (
        problem(7, 1056, 2048, "n"),
        Config("tile", 16, 64, 64, 1, 8, 4, 3, (("ahead", 2), ("early", 1))),
    ),
    "split, polled": (problem(16, 1280, 4096, "n"), Config("tile", 16, 16, 256, 1, 4, 2, 3, (("poll", 1),))),
    "gemv, polled by several warps": (
        problem(1, 1280, 8192),
        Config("gemv", 1, 16, 1024, 1, 4, 4, 1, (("ahead", 1), ("early", 1), ("poll", 1))),
    ),
    "gemv, three rows": (problem(3, 512, 4096), Config("gemv", 4, 4, 512, 1, 2, 4, 2)),
}
if TMA:
    CASES |= {
        "tma": (problem(777, 512, 256), Config("tma", 128, 128, 64, 8, 1, 8, 3)),
        "tma, split and bias": (problem(33, 264, 1032, "n"), Config("tma", 64, 64, 64, 1, 2, 4, 3)),
        "tma, started early": (
            problem(64, 8192, 1024),
            Config("tma", 64, 64, 128, 1, 1, 4, 4, (("ahead", 2), ("early", 1))),
        ),
        "two powers of two": (problem(1000, 776, 1032, "n"), Config("ws_tma", 128, 192, 64, 8, 1, 8, 3)),
        "padded": (problem(1000, 784, 1032, "n"), Config("ws_tma", 128, 112, 64, 8, 1, 8, 4)),
        "a pair of programs": (problem(904, 776, 1032, "n"), Config("ws_tma", 128, 64, 64, 8, 1, 8, 3, (("pair", 1),))),
        "adjacent programs": (
            problem(264, 904, 1032, "n"),
            Config("ws_tma", 128, 128, 64, 2, 1, 8, 4, (("adjacent", 1),)),
        ),
        "swapped": (
            problem(777, 776, 1032, "n"),
            Config("ws_tma_swapped", 264, 128, 64, 4, 1, 8, 3, (("swap_ab", 1),)),
        ),
        "persistent": (problem(1000, 4096, 512, "n"), Config("persistent", 128, 128, 64, 8, 1, 8, 3)),
        "persistent, halves": (
            problem(777, 2056, 256),
            Config("persistent", 128, 256, 64, 8, 1, 8, 3, (("epilogue_parts", 2),)),
        ),
    }
SHARED = [name for name in CASES if CASES[name][1].split_k > 1 or name == "stream-K"]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Every case loaded, and one size that the library won."""
    records = [record(*case) for case in CASES.values()]
    assert len({case[0] for case in CASES.values()}) == len(CASES), "two cases of one size"
    won = record(problem(64, 64, 64), Config("tile", 16, 16, 16), winner="torch")
    assert tritongemm.load([*records, won]) == len(records) + 1


def operands(name: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype, Tensor]:
    """x [M, K], w [N, K], the bias or None, the dtype to ask for, and the exact result."""
    p = CASES[name][0]
    given = DENSE.make_inputs(p, "cuda", seed=seed)
    w = given["b"].T.contiguous()
    return given["a"], w, given.get("bias"), getattr(torch, p.c.type.torch), DENSE.reference(p, given)


def assert_right(name: str, out: Tensor, exact: Tensor) -> None:
    assert verify.deviation(out.view(exact.shape), exact) <= DENSE.tolerance(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_every_template_is_right(name: str) -> None:
    for seed in range(3):
        x, w, bias, dtype, exact = operands(name, seed)
        assert tritongemm.explain(x, w, bias, dtype).startswith(f"exact: {CASES[name][1].name}")
        out = tritongemm.mm(x, w, bias, dtype)
        assert out.dtype == dtype
        assert_right(name, out, exact)


def test_more_dimensions() -> None:
    x, w, bias, _, exact = operands("split, bias")
    out = tritongemm.mm(x.view(4, 25, -1), w, bias)
    assert out.shape == (4, 25, 328) and out.is_contiguous()
    assert_right("split, bias", out, exact)


def test_nothing_is_read_or_compiled_after_warm_up() -> None:
    ready, watching = [operands(name) for name in CASES], True
    seen: list[str] = []

    def note(event: str, _: tuple[object, ...]) -> None:
        if watching:
            seen.append(event)

    for x, w, bias, dtype, _ in ready:
        tritongemm.mm(x, w, bias, dtype)
    sys.addaudithook(note)  # hooks can't be removed
    for x, w, bias, dtype, _ in ready:
        tritongemm.mm(x, w, bias, dtype)
    watching = False
    assert not {"open", "import", "compile", "subprocess.Popen"} & set(seen)


@pytest.mark.parametrize("name", SHARED)
def test_streams_do_not_meet(name: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(6)]
    outs: list[list[Tensor]] = [[] for _ in range(6)]
    work = [operands(name, seed) for seed in range(6)]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (x, w, bias, dtype, _), out in zip(streams, work, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(tritongemm.mm(x, w, bias, dtype))
    torch.cuda.synchronize()
    for (*_, exact), out in zip(work, outs, strict=True):
        assert all(torch.equal(out[0], o) for o in out)
        assert_right(name, out[-1], exact)


def test_threads_do_not_meet() -> None:
    def work(seed: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for name in CASES:
                for round_ in range(10):
                    x, w, bias, dtype, exact = operands(name, seed * 100 + round_)
                    assert_right(name, tritongemm.mm(x, w, bias, dtype), exact)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_sees_changed_operands(name: str) -> None:
    x, w, bias, dtype, _ = operands(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tritongemm.mm(x, w, bias, dtype)
        twice = tritongemm.mm(x, w, bias, dtype) * 2
    for seed in (1, 2, 3):
        new_x, new_w, new_bias, _, exact = operands(name, seed)
        x.copy_(new_x)
        w.copy_(new_w)
        if bias is not None:
            bias.copy_(new_bias)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert_right(name, out, exact)
        assert torch.equal(twice, out * 2)


@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_graphs_of_one_stream_run_side_by_side(name: str, exhausted: bool) -> None:
    workspaces = default_dispatcher()._devices[torch.cuda.current_device()].device.workspaces
    assert workspaces is not None, "some of the loaded kernels share memory"
    free, capture = workspaces._free, torch.cuda.Stream()
    workspaces.for_stream(capture.cuda_stream)
    if exhausted:
        workspaces._free = []
    made = []
    for seed in range(3):
        x, w, bias, dtype, exact = operands(name, seed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture):
            outs = [tritongemm.mm(x, w, bias, dtype) for _ in range(20)]
        made.append((graph, outs, exact, torch.cuda.Stream(), (x, w, bias)))
    workspaces._free = free
    x, w, bias, dtype, exact = operands(name, 9)
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, *_, stream, _ in made:
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(capture):
            eager = tritongemm.mm(x, w, bias, dtype)
    torch.cuda.synchronize()
    assert_right(name, eager, exact)
    for _, outs, wanted, _, _ in made:
        assert all(torch.equal(outs[0], o) for o in outs)
        assert_right(name, outs[0], wanted)


@pytest.mark.parametrize("name", SHARED)
def test_graphs_of_one_pool_share_counters(name: str) -> None:
    """As those of a server, which captures hundreds: one set serves all, and no graph zeroes one before each kernel."""
    workspaces = default_dispatcher()._devices[torch.cuda.current_device()].device.workspaces
    assert workspaces is not None
    x, w, bias, dtype, exact = operands(name, 4)
    made, pool, left = [], torch.cuda.graph_pool_handle(), 0
    for number in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            made.append((graph, tritongemm.mm(x, w, bias, dtype)))
        left = left if number else len(workspaces._free)
    assert len(workspaces._free) == left
    for graph, out in made:
        graph.replay()
        assert_right(name, out, exact)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()
    names = [n for n in CASES if "float32" not in n]
    ready = [operands(n) for n in names]

    def all_of_them(work: list[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        return [tritongemm.mm(x, w, bias).relu() for x, w, bias in work]

    compiled = torch.compile(all_of_them, fullgraph=True, mode=mode)
    for seed in range(4):  # recorded and replayed from the second and third
        for name, (x, w, bias, *_) in zip(names, ready, strict=True):
            for mine, other in zip((x, w, bias), operands(name, seed)[:3], strict=True):
                if mine is not None:
                    mine.copy_(other)
        for name, out in zip(names, compiled([(x, w, bias) for x, w, bias, *_ in ready]), strict=True):
            assert_right(name, out, operands(name, seed)[-1].relu())


def test_what_does_not_fit_is_right_all_the_same() -> None:
    x, w, _, _, exact = operands("tile")
    wide = torch.zeros(128, 1024, device="cuda", dtype=torch.bfloat16)
    wide[:, :512] = x
    odd = torch.empty(128 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(128, 512).copy_(x)
    cases = {
        "strides (1024, 1)": (wide[:, :512], w),
        "multiple of 16": (odd, w),
        "_TT was never tuned": (x, w.T.contiguous().T),
    }
    for reason, (left, right) in cases.items():
        said = tritongemm.explain(left, right)
        assert said.startswith("fallback") and reason in said
        assert_right("tile", tritongemm.mm(left, right), exact)
    assert "was never tuned for" in tritongemm.explain(x[:9], w)
    assert torch.equal(tritongemm.mm(x[:9], w), functional.linear(x[:9], w))
    small = x[:64, :64].contiguous()
    assert tritongemm.explain(small, small).startswith("library: torch won")
    assert torch.equal(tritongemm.mm(small, small), functional.linear(small, small))


def test_gradients_autocast_and_vmap() -> None:
    x, w, _, _, exact = operands("tile")
    with torch.enable_grad():
        weight = torch.nn.Parameter(w)
        assert "gradient" in tritongemm.explain(x, weight)
        assert tritongemm.mm(x, weight).requires_grad
    with torch.autocast("cuda", torch.bfloat16):
        out = tritongemm.mm(x.float(), w.float())
    assert out.dtype == torch.bfloat16
    assert_right("tile", out, exact)
    for out in torch.vmap(tritongemm.mm, (0, None))(x.expand(3, *x.shape), w):
        assert_right("tile", out, exact)


@pytest.mark.parametrize("bias", ["none", "n"])
def test_an_algorithm_of_the_library_serves(bias: str) -> None:
    p = problem(64, 512, 4096, bias)
    operands = DENSE.make_inputs(p, "cuda")
    x, w, given = operands["a"], operands["b"].T.contiguous(), operands.get("bias")
    out = torch.empty(p.m, p.n, device="cuda", dtype=torch.bfloat16)
    exact = DENSE.reference(p, operands)
    configs = registry.get(LibraryBackend, "blaslt").list_algorithms(p, operands | {"c": out})
    for config in (configs[0], next((c for c in configs if c.split_k > 1), configs[-1])):
        unloaded = Dispatcher()
        unloaded.load([record(p, config, winner="blaslt")])
        assert unloaded.explain(x, w, given).resolution.kind == "exact"
        for scale in (1, 2):  # other addresses
            moved = unloaded.run(x * scale, w.clone(), None if given is None else given * scale, None)
            assert verify.deviation(moved, exact * scale) <= DENSE.tolerance(p)
        assert verify.deviation(replayed(unloaded.run, x, w, given, None), exact) <= DENSE.tolerance(p)


def test_other_records_fall_back() -> None:
    x, w, _, _, exact = operands("tile")
    case = CASES["tile"]
    other = Dispatcher()
    other.load([record(*case, target="gfx942" if VENDOR == "nvidia" else "sm90")])
    assert "was tuned for" in str(other.explain(x, w))
    assert_right("tile", other.run(x, w, None, None), exact)
    (huge := Dispatcher()).load([record(case[0], Config("tile", 256, 256, 128, 8, 1, 8, 4))])
    assert "out_of_resources" in str(huge.explain(x, w))
    assert_right("tile", huge.run(x, w, None, None), exact)


def test_an_older_toolchain_is_checked_and_a_wrong_kernel_refused(monkeypatch: Patch, tmp_path: Path) -> None:
    x, w, _, _, exact = operands("tile")
    old = record(*CASES["tile"], toolchain={"triton": "3.0.0"})
    unloaded = Dispatcher()
    unloaded.load([old])
    assert unloaded.explain(x, w).resolution.kind == "exact"
    assert_right("tile", unloaded.run(x, w, None, None), exact)
    monkeypatch.setattr(DENSE, "tolerance", lambda _: 0.0)
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path))  # what was right is remembered in a cache
    strict = Dispatcher()
    strict.load([old])
    assert "wrong with Triton" in str(strict.explain(x, w))


def test_a_capture_before_loading_is_computed_by_pytorch() -> None:
    x, w, _, _, exact = operands("split")
    late = Dispatcher()
    late._records, late._records_read = RecordTable([record(*CASES["split"])]), True
    late.run(x[:2], torch.empty(8, 1024, device="cuda", dtype=torch.bfloat16), None, None)
    late._devices = {}
    assert_right("split", replayed(late.run, x, w, None, None), exact)
    assert late.explain(x, w).resolution.kind == "exact"
