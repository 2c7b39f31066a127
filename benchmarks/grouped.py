"""Grouped products beside PyTorch's and DeepGEMM's, and fused_moe beside two calls; on one GPU, in one process.

    python benchmarks/grouped.py [--kind block|row|bf16] [--form contiguous|masked] [--experts 8,64,256]
        [--shapes 4096x7168,7168x2048,2048x768] [--tokens 1,8,64] [--prefill 256] [--spread uniform|skewed]
        [--budget 60s] [--rows TUNED.yaml] [--deepgemm DIR] [--moe]

Sizes are tuned first, into --rows, unless that has them. --tokens are of a decode step, each with 8 experts; --prefill
are rows of each expert. Then our best kernel, PyTorch's product and DeepGEMM's (of a folder with the package deep_gemm,
where it is not installed) take turns on operands that rotate through copies larger than the last-level cache, each in a
CUDA graph. DeepGEMM's contiguous product gets the same rows with each expert's padded to its alignment. Printed are
medians in microseconds, the gain over the faster of the others, and errors against float64.

--moe times `tritongemm.fused_moe` of the first shape instead, and the same layer in two calls of a product: of
`tritongemm.grouped_mm` with PyTorch and `tritongemm.quantize` between, of DeepGEMM's contiguous and masked products
with the kernels of fused_moe between, and of PyTorch's. Sorting, both quantisations, the activation and the weighted
sum are included; each is one graph, and they take turns. Printed are our microseconds, and of each other its
microseconds, how many times ours that is, and in brackets the error against float64, which is mostly that of the
quantised activations.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from _common import ROOT, gpu_seconds, make_operands, read_numbers, read_shapes, time_calls
from _mixtures import (
    Mixture,
    PaddedCalls,
    by_public_calls,
    contiguous_places,
    deep_gemm_product,
    make_mixture,
    masked_places,
    reference,
)
from _mixtures import deviation as mixture_deviation

from tritongemm.backends.deepgemm import package as deepgemm_package
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.prepare import prepare_launches
from tritongemm.core.errors import UnavailableError
from tritongemm.core.group_rows import Groups, row_counts
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.hip_ext import machine
from tritongemm.measure.jobs import LaunchCandidate
from tritongemm.measure.operand_sets import OperandSets
from tritongemm.numerics import grouped, verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.source_row import read_source
from tritongemm.system import settings

TOPK, ROUNDS, GRAPH_US, REPLAYS = 8, 15, 400, 5
ROOM_STEP = 128  # DeepGEMM writes full tiles: rows of room that are no multiple of one would be the next expert's
FAMILIES = {"block": "a8w8_blockscale", "row": "a8w8", "bf16": "dense"}
Calls = list[Callable[[], object]]


def list_problems(args: argparse.Namespace, fp8: str) -> list[Problem]:
    """The products that are asked for."""
    found = []
    for experts in args.experts:
        for n, k in args.shapes:
            rows = [tokens * TOPK for tokens in args.tokens] + [each * experts for each in args.prefill]
            found += [make_problem(args, fp8, m, experts, n, k) for m in rows]
    return list(dict.fromkeys(found))  # tokens and rows of an expert may mean the same product


def make_problem(args: argparse.Namespace, fp8: str, m: int, experts: int, n: int, k: int) -> Problem:
    """One product; the masked form has room for twice the rows of an even spread, and for those of every expert."""
    family = registry.get(Family, FAMILIES[args.kind])
    dtype = "bf16" if args.kind == "bf16" else fp8
    most = max(2 * cdiv(m, experts), *row_counts(m, experts, args.spread))
    room = round_up(most, ROOM_STEP) if args.form == "masked" else 0
    made: Problem = family.problem(
        Problem(m, n, k, *matrices(dtype, c="bf16", layout="TN"), groups=Groups(experts, room=room, spread=args.spread))
    )
    return made


def tune(problems: Sequence[Problem], args: argparse.Namespace) -> dict[Problem, Record]:
    """The record of each, tuned into the file of rows where that has none."""
    rows: Path = args.rows
    known = {row.record.problem: row.record for row in read_source(rows)} if rows.exists() else {}
    if missing := [p for p in problems if p not in known]:
        sizes = rows.with_suffix(".sizes.yaml")
        sizes.write_text("".join(_size_row(p) for p in missing), encoding="utf-8")
        command = [sys.executable, "-m", "tritongemm.tune", "--gemm_size_file", str(sizes), "-o", str(rows)]
        subprocess.run([*command, "--libtype", "triton", "--budget", args.budget], check=True, cwd=ROOT)
        known = {row.record.problem: row.record for row in read_source(rows)}
    return {p: known[p] for p in problems if p in known}


def _size_row(p: Problem) -> str:
    said = f"M: {p.m}, N: {p.n}, K: {p.k}, rowMajorA: T, rowMajorB: N, dtype_a: {p.a.dtype}, dtype_c: bf16, "
    said += f"family: {p.family}, groups: {p.group_count}, group_spread: {p.groups.spread}"
    return "- {" + said + (f", group_form: masked, group_room: {p.group_m}" if p.masked else "") + "}\n"


def deep_gemm(folder: str) -> Any:
    """The package, or None where it does not load."""
    if folder:
        sys.path.insert(0, folder)
    try:
        return deepgemm_package.load()
    except UnavailableError as error:
        print(f"no DeepGEMM: {error}")
        return None


def deep_gemm_calls(package: Any, problem: Problem, sets: OperandSets, count: int) -> tuple[Calls, Callable[[], Any]]:
    """DeepGEMM's product on each copy, and what gives its C in our shape."""
    calls: Calls = []
    results: list[torch.Tensor] = []
    scaled = problem.a.scaling is not None
    place = _padded_places(problem, package) if not problem.masked else None
    form = "masked" if problem.masked else "contiguous"
    product = getattr(package, f"m_grouped_{'fp8' if scaled else 'bf16'}_gemm_nt_{form}")
    for operands in sets.sets[:count]:
        a, b = operands["a"], operands["b"].mT
        of_a = operands["scale_a"].mT if scaled else None
        if place is not None:
            total = place[1].numel()
            words = a.view(torch.int16 if a.element_size() == 2 else torch.uint8)  # fp8 has no such copy
            padded = torch.zeros(total, problem.k, dtype=words.dtype, device=a.device).index_copy_(0, place[0], words)
            a = padded.view(a.dtype)
            if of_a is not None:
                of_a = torch.zeros(total, of_a.shape[1], device=a.device).index_copy_(0, place[0], of_a)
        d = torch.empty(*a.shape[:-1], problem.n, dtype=torch.bfloat16, device=a.device)
        left: Any = a
        right: Any = b
        if of_a is not None:
            left = a, package.utils.get_mn_major_tma_aligned_tensor(of_a.contiguous())
            right = b, operands["scale_b"]
        if place is not None:
            calls.append(partial(product, left, right, d, place[1]))
        else:
            calls.append(
                partial(product, left, right, d, operands["counts"], max(1, cdiv(problem.m, problem.group_count)))
            )
        results.append(d)
    return calls, lambda: results[0] if place is None else results[0][place[0]]


def _padded_places(problem: Problem, package: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each row once experts begin at multiples of the alignment, and the expert of each row or -1."""
    step, places, experts = package.get_mk_alignment_for_contiguous_layout(), [], []
    for group, rows in enumerate(problem.row_counts):
        places += range(len(experts), len(experts) + rows)
        experts += [group] * rows + [-1] * (-rows % step)
    return torch.tensor(places, device="cuda"), torch.tensor(experts, dtype=torch.int32, device="cuda")


def race(entries: dict[str, Calls], sets: OperandSets) -> dict[str, float]:
    """Median microseconds of each competitor, which take turns."""
    graphs = {}
    for name, calls in entries.items():
        launches = max(len(calls), min(64, int(GRAPH_US / time_calls(calls))))
        graphs[name] = sets.capture([calls[i % len(calls)] for i in range(launches)]), launches
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            graph, launches = graphs[name]
            graph.launch(sets.stream)
            samples[name].append(1e6 * gpu_seconds(partial(graph.launch, sets.stream)) / launches)
    for graph, _ in graphs.values():
        graph.destroy()
    return {name: median(times) for name, times in samples.items()}


def compare(problem: Problem, record: Record, here: machine.Machine, package: Any) -> float:
    """Race one product; the gain over the faster of the others."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sets = make_operands(problem, here, stream.cuda_stream)
        launch = prepare_launches([record], here.target, ArtifactCache(settings.cache_folder()))[problem]
        if isinstance(launch, str):
            raise SystemExit(f"{problem.key}: {launch}")
        count = min(sets.copies, 8)
        prepared = sets.prepare(LaunchCandidate(record.config, launch), count)
        entries: dict[str, Calls] = {"ours": prepared.calls}
        if theirs := sets.library_calls("torch", count):
            entries["torch"] = theirs
        found: dict[str, Callable[[], Any]] = {"ours": lambda: sets.sets[0]["c"]}
        if package is not None and problem.family != "a8w8":
            entries["deepgemm"], found["deepgemm"] = deep_gemm_calls(package, problem, sets, count)
        errors = {}
        for name, result in found.items():
            entries[name][0]()
            torch.cuda.synchronize()
            c, exact = grouped.written(problem, result(), sets.reference)
            errors[name] = verify.deviation(c, exact)
        times = race(entries, sets)
        prepared.unload()
    others = [us for name, us in times.items() if name != "ours"]
    gain = min(others) / times["ours"] if others else float("nan")
    said = "  ".join(f"{name} {us:8.2f}" for name, us in times.items())
    wrong = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
    size = f"{problem.group_count:4} x {problem.n:5} x {problem.k:5}  M {problem.m:6}"
    print(f"{size}  {said}  gain {gain:.3f}  errors {wrong}  {record.config.short_name}", flush=True)
    return gain


def mixture_calls(mixture: Mixture, package: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """The layer of experts by each competitor."""
    import tritongemm
    from tritongemm.operations.grouped import grouped as by_pytorch
    from tritongemm.operations.grouped_operands import GroupedOperands
    from tritongemm.serving import mixtures

    run_grouped = mixtures.run_grouped

    def with_pytorchs_products() -> torch.Tensor:
        mixtures.run_grouped = lambda *given: by_pytorch(GroupedOperands(*given))
        try:
            return tritongemm.fused_moe(*mixture.arguments)
        finally:
            mixtures.run_grouped = run_grouped

    calls = {
        "ours": lambda: tritongemm.fused_moe(*mixture.arguments),
        "two calls of ours": lambda: by_public_calls(mixture),
        "PyTorch's products": with_pytorchs_products,
    }
    if package is None or mixture.mode == "row":
        return calls
    counts, device = mixture.counts, mixture.x.device
    product = deep_gemm_product(max(1, cdiv(sum(counts), len(counts))), bool(mixture.mode))
    step = package.get_mk_alignment_for_contiguous_layout()
    calls["DeepGEMM contiguous"] = PaddedCalls(mixture, contiguous_places(counts, step, device), product)
    calls["DeepGEMM masked"] = PaddedCalls(mixture, masked_places(counts, ROOM_STEP, device), product)
    return calls


def race_mixtures(calls: dict[str, Callable[[], torch.Tensor]], exact: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Median microseconds and deviation of each competitor, which take turns; failed ones are reported and left out."""
    graphs, errors = {}, {}
    for name, call in calls.items():
        try:
            errors[name] = mixture_deviation(call(), exact)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                call()
        except RuntimeError as error:
            graphs.pop(name, None)
            torch.cuda.empty_cache()  # it may be that memory was short, and others want some
            print(f"no {name}: {str(error).partition(chr(10))[0]}", flush=True)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            graphs[name].replay()
            samples[name].append(1e6 * gpu_seconds(graphs[name].replay, REPLAYS) / REPLAYS)
    return {name: (median(times), errors[name]) for name, times in samples.items()}


def compare_mixtures(args: argparse.Namespace, here: machine.Machine, package: Any) -> None:
    """Time fused_moe with tuned kernels beside two calls of products, all steps between included."""
    import tritongemm

    tritongemm.load(args.rows)
    fp8 = torch.float8_e4m3fnuz if here.target.fp8 == "fnuz" else torch.float8_e4m3fn
    both, hidden = args.shapes[0]
    gains = []
    for experts in args.experts:
        for tokens in (*args.tokens, *(each * experts // TOPK for each in args.prefill)):
            mixture = make_mixture(
                tokens, experts, TOPK, hidden, both // 2, "" if args.kind == "bf16" else args.kind, fp8
            )
            found = race_mixtures(mixture_calls(mixture, package), reference(mixture))
            if "ours" not in found:
                raise SystemExit("fused_moe fails; there is nothing to compare")
            us, error = found.pop("ours")
            others = "; ".join(
                f"{name} {time:.1f} = {time / us:.3f} ({off:.1e})" for name, (time, off) in found.items()
            )
            print(f"fused_moe {experts} experts, {tokens} tokens: {us:.1f} us ({error:.1e}); {others}", flush=True)
            theirs = [time for name, (time, _) in found.items() if name.startswith("DeepGEMM")]
            gains += [min(theirs) / us] if theirs else []
    if gains:
        print(f"over the faster of DeepGEMM's: geometric mean {geometric_mean(gains):.3f}, least {min(gains):.3f}")


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=FAMILIES, default="block")
    parser.add_argument("--form", choices=("contiguous", "masked"), default="contiguous")
    parser.add_argument("--experts", type=read_numbers, default=[8, 64, 256])
    parser.add_argument("--shapes", type=read_shapes, default=[(4096, 7168), (7168, 2048), (2048, 768)])
    parser.add_argument("--tokens", type=read_numbers, default=[1, 8, 64])
    parser.add_argument("--prefill", type=read_numbers, default=[256])
    parser.add_argument("--spread", choices=("uniform", "skewed"), default="uniform")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--rows", type=Path, default=Path("output/grouped_rows.yaml"))
    parser.add_argument("--deepgemm", default="")
    parser.add_argument("--moe", action="store_true")
    args = parser.parse_args()
    here = machine.find_machine(None)
    if not here.devices:
        raise SystemExit("no GPU here")
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    fp8 = "fp8e4m3fnuz" if here.target.fp8 == "fnuz" else "fp8e4m3fn"
    problems = list_problems(args, fp8)
    if args.moe:
        args.shapes, args.form = args.shapes[:1], "contiguous"
        problems = list_problems(args, fp8)
        down = [make_problem(args, fp8, p.m, p.group_count, p.k, p.n // 2) for p in problems]
        tune([*problems, *down], args)
        compare_mixtures(args, here, deep_gemm(args.deepgemm))
        return 0
    records, package = tune(problems, args), deep_gemm(args.deepgemm)
    gains = [compare(p, records[p], here, package) for p in problems if p in records]
    if gains:
        print(f"geometric mean {geometric_mean(gains):.3f}, least {min(gains):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
