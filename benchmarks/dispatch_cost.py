"""What a call costs the host: `tritongemm.mm` beside `torch.nn.functional.linear`, in one process, on a GPU.

So are `tritongemm.scaled_mm` beside `torch._scaled_mm`, `quantize` and `linear_fp8` beside PyTorch's own operations,
`linear_act` beside `linear` and the activation, and `bmm`, `scaled_bmm`, `grouped_mm`, `fused_moe` and `linear_w4`
beside PyTorch's products of bfloat16.

    python benchmarks/dispatch_cost.py

Sizes are so small that the GPU waits for the host; calls are queued, and waited for outside the measured time. A round
measures every competitor once, in a new order; printed are medians over the rounds, beside those of `linear` for the
same operands. "moving" operands change with every call, as the layers of a model do, so that every address and tensor
map is written anew.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import _common  # noqa: F401 (it puts the checkout on Python's path)
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.hip_ext.driver import driver
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.search_spaces import loader
from tritongemm.system import settings

M, K = 16, 256
CONFIGS = {
    "tile": (256, Config("tile", 16, 64, 64, 1, 1, 4, 3)),
    "tile, split-K": (320, Config("tile", 16, 64, 64, 1, 2, 4, 3)),
    "tma": (384, Config("tma", 64, 64, 64, 1, 1, 4, 3)),
    "persistent": (512, Config("persistent", 64, 64, 64, 1, 1, 4, 3)),
}
NEVER, LOST, ALGORITHM, RANGE, ROW_MAJOR = 128, 192, 448, 576, 704  # other N
LINEAR = " by linear"  # what stands beside a competitor: `linear`, or PyTorch's function of the same kind
SCALED = 640  # N of products with scales
BATCH, BATCHED = 4, 768  # products of a batch, groups and experts; their N


def measure(calls: dict[str, Callable[[int], object]], rounds: int, count: int) -> dict[str, float]:
    """Median microseconds of a call of each competitor."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-2, rounds):  # the first two warm up
        for name in random.sample(list(calls), len(calls)):
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(count):
                call(i)
            took = time.perf_counter() - start
            if round_ >= 0:
                samples[name].append(took / count * 1e6)
    return {name: median(values) for name, values in samples.items()}


def print_table(found: dict[str, float]) -> None:
    """Print each competitor's time beside that of `linear` for the same operands."""
    print(f"{'competitor':36} {'us':>7} {'torch':>7}  ratio")
    for name, us in found.items():
        if not name.endswith(LINEAR):
            beside = found[name + LINEAR]
            print(f"{name:36} {us:7.2f} {beside:7.2f}  {us / beside:.2f}")


def scaled_calls(arch: str, toolchain: dict[str, str]) -> dict[str, Callable[[int], object]]:
    """Calls of `scaled_mm` with factors for rows, and of `quantize`, where this GPU has OCP's fp8."""
    if loader.load_target(arch).fp8 != "fn":
        return {}
    family, config = registry.get(Family, "a8w8"), CONFIGS["tile"][1]
    one = family.problem(Problem(M, SCALED, K, *matrices("fp8e4m3fn", c="bf16", layout="TN")))
    tritongemm.load([Record(one, arch, config, "triton", 1e-6, 0.0, "events", toolchain=toolchain)])
    eight = torch.float8_e4m3fn
    xs, ws = ([torch.randn(rows, K, device="cuda").to(eight) for _ in range(64)] for rows in (M, SCALED))
    of_x, of_w, of_w_row = (torch.ones(shape, device="cuda") for shape in ((M, 1), (SCALED,), (1, SCALED)))
    require("scaled_mm", xs[0], ws[0], of_x, of_w)
    require("linear_fp8", torch.randn(M, K, device="cuda", dtype=torch.bfloat16), ws[0], of_w)
    wide = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    bfloat16 = torch.bfloat16

    def by_torch(i: int) -> object:
        return torch._scaled_mm(xs[i], ws[i].t(), of_x, of_w_row, out_dtype=bfloat16)

    def quantized_by_torch(i: int) -> tuple[Tensor, Tensor]:
        x = wide[i & 63]
        factor = x.abs().amax(1, keepdim=True).float() / 448
        return (x / factor).to(eight), factor

    def layer_by_torch(i: int) -> object:
        x, factor = quantized_by_torch(i)
        return torch._scaled_mm(x, ws[i & 63].t(), factor, of_w_row, out_dtype=bfloat16)

    return {
        "scaled, rows": lambda i: tritongemm.scaled_mm(xs[0], ws[0], of_x, of_w),
        f"scaled, rows{LINEAR}": lambda i: by_torch(0),
        "scaled, rows, moving": lambda i: tritongemm.scaled_mm(xs[i & 63], ws[i & 63], of_x, of_w),
        f"scaled, rows, moving{LINEAR}": lambda i: by_torch(i & 63),
        "quantize, rows": lambda i: tritongemm.quantize(wide[i & 63]),
        f"quantize, rows{LINEAR}": quantized_by_torch,
        "linear_fp8, rows": lambda i: tritongemm.linear_fp8(wide[i & 63], ws[i & 63], of_w),
        f"linear_fp8, rows{LINEAR}": layer_by_torch,
    }


def require(call: str, *operands: object) -> None:
    """Stop where PyTorch computes a call, so that no launch would be measured."""
    try:
        said = tritongemm.explain(call, *operands)
    except TypeError:  # of a version that explains `mm` alone
        return
    if any(not line.startswith(("exact", "quantised", " ")) for line in said.splitlines()):
        raise SystemExit(f"{call}: {said}")


def other_calls(arch: str, toolchain: dict[str, str]) -> dict[str, Callable[[int], object]]:
    """Calls of the other operations, beside PyTorch's products of bfloat16."""
    tile, grouped = CONFIGS["tile"][1], Config("grouped", 16, 64, 64, 1, 1, 4, 2, (("per_unit", 1),))
    dense, eight = registry.get(Family, "dense"), registry.get(Family, "a8w8")
    has_fp8, fp8, bf16 = loader.load_target(arch).fp8 == "fn", "fp8e4m3fn", ("bf16",) * 3
    four = registry.get(Family, "a16w4").problem(Problem(M, BATCHED, K, *matrices("bf16", "int4", "bf16", layout="TN")))
    problems = {dense.problem(Problem(M, BATCHED, K, *matrices(*bf16, layout="TN"), batch=BATCH)): tile, four: tile}
    problems[dense.problem(Problem(M, 2 * BATCHED, K, *matrices(*bf16, layout="TN"), epilogue="silu_mul"))] = tile
    mixture = [
        dense.problem(Problem(M, n, k, *matrices(*bf16, layout="TN"), groups=Groups(BATCH)))
        for n, k in ((2 * K, K), (K, K))
    ]
    problems |= dict.fromkeys(
        (*mixture, dense.problem(Problem(M, BATCHED, K, *matrices(*bf16, layout="TN"), groups=Groups(BATCH)))), grouped
    )
    if has_fp8:
        problems[eight.problem(Problem(M, BATCHED, K, *matrices(fp8, c="bf16", layout="TN"), batch=BATCH))] = tile
        problems[eight.problem(Problem(M, BATCHED, K, *matrices(fp8, c="bf16", layout="TN"), groups=Groups(BATCH)))] = (
            grouped
        )
    tritongemm.load(
        Record(problem, arch, config, "triton", 1e-6, 0.0, "events", toolchain=toolchain)
        for problem, config in problems.items()
    )

    def make(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(64)]

    a, w, rows = make(BATCH, M, K), torch.randn(BATCH, BATCHED, K, device="cuda", dtype=torch.bfloat16), make(M, K)
    ends = torch.arange(1, BATCH + 1, device="cuda", dtype=torch.int32) * (M // BATCH)
    w1, w2 = (torch.randn(BATCH, n, K, device="cuda", dtype=torch.bfloat16) for n in (2 * K, K))
    tokens, weights = make(M // 2, K), torch.rand(M // 2, 2, device="cuda")
    ids = torch.randint(0, BATCH, (M // 2, 2), device="cuda", dtype=torch.int32)
    gate_up = torch.randn(2 * BATCHED, K, device="cuda", dtype=torch.bfloat16)
    nibbles = torch.randint(0, 256, (BATCHED, K // 2), device="cuda", dtype=torch.uint8)
    of_nibbles = torch.ones(K // 128, BATCHED, device="cuda", dtype=torch.bfloat16)
    require("linear_act", rows[0], gate_up, "silu_mul")
    require("linear_w4", rows[0], nibbles, of_nibbles)
    require("bmm", a[0], w.mT)
    require("grouped_mm", rows[0], w.mT, ends)
    require("fused_moe", tokens[0], w1, w2, weights, ids)

    def by_groups(i: int) -> object:
        return torch._grouped_mm(rows[i & 63], w.mT, offs=ends)

    def mixture_by_torch(i: int) -> object:
        h = torch._grouped_mm(rows[i & 63], w1.mT, offs=ends)
        return torch._grouped_mm(h[:, :K].contiguous(), w2.mT, offs=ends)

    def activated_by_torch(i: int) -> object:
        gate, up = functional.linear(rows[i & 63], gate_up).chunk(2, 1)
        return functional.silu(gate) * up

    calls: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
        "linear_act": (lambda i: tritongemm.linear_act(rows[i & 63], gate_up, "silu_mul"), activated_by_torch),
        "linear_w4": (
            lambda i: tritongemm.linear_w4(rows[i & 63], nibbles, of_nibbles),
            lambda i: functional.linear(rows[i & 63], w[0]),
        ),
        "bmm": (lambda i: tritongemm.bmm(a[0], w.mT), lambda i: torch.bmm(a[0], w.mT)),
        "bmm, moving": (lambda i: tritongemm.bmm(a[i & 63], w.mT), lambda i: torch.bmm(a[i & 63], w.mT)),
        "grouped": (lambda i: tritongemm.grouped_mm(rows[0], w.mT, ends), by_groups),
        "grouped, moving": (lambda i: tritongemm.grouped_mm(rows[i & 63], w.mT, ends), by_groups),
        "mixture": (lambda i: tritongemm.fused_moe(tokens[i & 63], w1, w2, weights, ids), mixture_by_torch),
    }
    if has_fp8:
        q, of_q, of_w = (
            w.to(torch.float8_e4m3fn),
            torch.ones(M, device="cuda"),
            torch.ones(BATCH, BATCHED, device="cuda"),
        )
        a8, rows8 = ([one.to(q.dtype) for one in many] for many in (a, rows))
        of_a = torch.ones(BATCH, M, device="cuda")
        require("scaled_bmm", a8[0], q.mT, of_a, of_w)
        require("grouped_mm", rows8[0], q.mT, ends, of_q, of_w)
        calls["scaled batch"] = lambda i: tritongemm.scaled_bmm(a8[i & 63], q.mT, of_a, of_w), calls["bmm, moving"][1]
        calls["scaled groups"] = lambda i: tritongemm.grouped_mm(rows8[i & 63], q.mT, ends, of_q, of_w), by_groups
    return {
        f"{name}{whose}": one for name, pair in calls.items() for whose, one in zip(("", LINEAR), pair, strict=True)
    }


def main() -> None:
    """Load records of every kind, time calls of them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=500, help="calls a round queues of one competitor (default 500)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    vendor = driver.find_vendor()
    if vendor is None or not torch.cuda.is_available():
        parser.error("needs a GPU")
    device = driver.open_driver(vendor).device()
    configs = {n: c for n, c in CONFIGS.items() if vendor == "nvidia" or c[1].template not in ("tma", "persistent")}
    toolchain = {"triton": settings.version("triton")}

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    def problem(n: int, bias: str) -> Problem:
        return Problem(M, n, K, *matrices("bf16", layout="TN"), bias=bias)

    def record(n: int, config: Config, bias: str, winner: str = "triton") -> Record:
        return Record(
            problem(n, bias), device.arch, config, winner, 1e-6, 0.0, "events", toolchain=toolchain, library="torch"
        )

    libraries = [b for b in registry.every(LibraryBackend) if not b.baseline]

    def algorithm(n: int, bias: str) -> Config:
        """An algorithm that the library would not take itself."""
        operands = {"a": tensor(M, K), "b": tensor(n, K).T, "c": tensor(M, n)} | (
            {"bias": tensor(n)} if bias == "n" else {}
        )
        return libraries[0].list_algorithms(problem(n, bias), operands, 2)[-1]

    kinds = ("none", "n")
    records = [record(n, config, bias) for n, config in configs.values() for bias in kinds]
    records += [record(ALGORITHM, algorithm(ALGORITHM, bias), bias, libraries[0].name) for bias in kinds]
    records += [record(LOST, CONFIGS["tile"][1], bias, "torch") for bias in kinds]
    for bias in kinds:
        ranged, row_major = (record(n, CONFIGS["tile"][1], bias) for n in (RANGE, ROW_MAJOR))
        records.append(replace(ranged, problem=replace(ranged.problem, m=2 * M), m_from=1))
        records.append(
            replace(row_major, problem=replace(row_major.problem, b=row_major.problem.b._replace(row_major=True)))
        )
    start = time.perf_counter()
    tritongemm.load(records)
    seconds = time.perf_counter() - start

    calls: dict[str, Callable[[int], object]] = {}

    def add(name: str, n: int, says: str, dtype: torch.dtype = torch.bfloat16, m: int = M, k: int = K) -> None:
        xs, ws = ([tensor(rows, k, dtype=dtype) for _ in range(64)] for rows in (m, n))
        ws = [w.t().contiguous().t() for w in ws] if n == ROW_MAJOR else ws
        bias, x, w = tensor(n, dtype=dtype), xs[0], ws[0]
        said = tritongemm.explain(x, w)
        if not said.startswith(says):
            raise SystemExit(f"{name}: {said}")
        for whose, function in (("", tritongemm.mm), (LINEAR, functional.linear)):
            calls[f"{name}{whose}"] = lambda i, call=function: call(x, w)
            calls[f"{name}, bias{whose}"] = lambda i, call=function: call(x, w, bias)
            calls[f"{name}, moving{whose}"] = lambda i, call=function: call(xs[i & 63], ws[i & 63])

    for name, (n, config) in configs.items():
        add(name, n, f"exact: {config.name}")
    add("tile, range of M", RANGE, "range: ")
    add("tile, B row-major", ROW_MAJOR, "exact: ")
    library = "cuBLASLt" if vendor == "nvidia" else "hipBLASLt"
    add(f"{library}'s algorithm", ALGORITHM, f"exact: {libraries[0].name}.")
    add("library won", LOST, "library")
    add("never tuned", NEVER, "fallback")
    add("never tuned, float32", NEVER, "fallback", torch.float32)
    # PyTorch launches two kernels for it: the second adds up what the first leaves in a workspace.
    add("never tuned, split", 100, "fallback", m=33, k=999)
    add("never tuned, split, float32", 100, "fallback", torch.float32, m=33, k=999)
    calls |= scaled_calls(device.arch, toolchain) | other_calls(device.arch, toolchain)
    with torch.inference_mode():
        found = measure(calls, args.rounds, args.count)
    print(
        f"{device.name}, torch {torch.__version__}, triton {settings.version('triton')}; loading took {seconds:.1f} s"
    )
    print_table(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
