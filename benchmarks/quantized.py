"""Products of eight bits, the quantisation of their activations included, beside bf16's best; on one GPU, one process.

    python benchmarks/quantized.py [--kinds row,block] [--sizes 2112x7168,7168x2048,4096x7168,24576x1536,7168x16384]
        [--m 16,64,128,256,1024,4096] [--rows TUNED.yaml] [--tune-options "--budget 60s"] [--algorithms 32]

Sizes that --rows lacks are tuned into it first, bf16's too. Then these take turns, each in a CUDA graph, on operands
that rotate through copies larger than the last-level cache: PyTorch's bf16 product, our tuned bf16 one, and of each
kind our fp8 product alone, the same after the kernel that quantises its activations from bf16, that kernel alone, and
the best of cuBLASLt's algorithms for the same operands. Printed are medians in microseconds; the faster bf16 product
over quantisation and product; and cuBLASLt's time over ours. Errors are against float64 of what was quantised.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import torch
from _common import ROOT, gpu_seconds, make_operands, read_numbers, read_shapes, time_calls

from tritongemm.build import helpers
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.prepare import brings_kernels, prepare_launches
from tritongemm.build.quantization_kernels import choose_kernel
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.launching.patched_launch import prepare_launch, tensor_map_makers
from tritongemm.measure.jobs import LaunchCandidate
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets
from tritongemm.numerics import verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.serving.source_row import read_source
from tritongemm.system import settings
from tritongemm.tune.quantization import quantization_of

FAMILIES = {"bf16": "dense", "row": "a8w8", "block": "a8w8_blockscale"}
ROUNDS, GRAPH_US, MOST_COPIES, FEW_ROWS = 15, 400, 64, 64
Calls = list[Callable[[], object]]


def make_problem(kind: str, m: int, n: int, k: int, fp8: str) -> Problem:
    """A linear layer's product of a kind."""
    dtype = "bf16" if kind == "bf16" else fp8
    made: Problem = registry.get(Family, FAMILIES[kind]).problem(
        Problem(m, n, k, *matrices(dtype, c="bf16", layout="TN"))
    )
    return made


def tune(problems: Sequence[Problem], rows: Path, options: Sequence[str]) -> dict[Problem, Record]:
    """The record of each, tuned into the file of rows where that has none."""
    known = _read(rows)
    if missing := [p for p in problems if p not in known]:
        sizes = rows.with_suffix(".sizes.yaml")
        sizes.write_text("".join(_size_row(p) for p in missing), encoding="utf-8")
        command = [sys.executable, "-m", "tritongemm.tune", "--gemm_size_file", str(sizes), "-o", str(rows), *options]
        subprocess.run(command, check=True, cwd=ROOT)
        known = _read(rows)
    return known


def _read(rows: Path) -> dict[Problem, Record]:
    if not rows.exists():
        return {}
    records = [row.record for row in read_source(rows)]
    return {record.problem: record for record in sorted(records, key=lambda record: not record.m_from)}


def _size_row(p: Problem) -> str:
    said = f"M: {p.m}, N: {p.n}, K: {p.k}, rowMajorA: T, rowMajorB: N, dtype_a: {p.a.dtype}, dtype_c: {p.c.dtype}"
    return "- {" + f"{said}, family: {p.family}, epilogue: {p.epilogue}" + "}\n"


class Competitor:
    """Calls on copies of operands, and their graph.

    Args:
        sets: the operands.
        calls: one for each copy.
    """

    def __init__(self, sets: OperandSets, calls: Calls) -> None:
        self.sets, self.calls = sets, calls  # what calls hold is what the graph reads and writes
        self.launches = max(len(calls), min(256, int(GRAPH_US / time_calls(calls))))
        self.graph: driver.Graph = sets.capture([calls[i % len(calls)] for i in range(self.launches)])
        self.samples: list[float] = []

    def sample(self, lead_in: LeadInKernel) -> None:
        """Microseconds of one call, from a replay."""
        lead_in()
        self.samples.append(1e6 * gpu_seconds(partial(self.graph.launch, self.sets.stream)) / self.launches)


def race(competitors: dict[str, Competitor], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of each competitor, which take turns."""
    lead_in = LeadInKernel("cuda")
    for turn in range(rounds):
        for name in list(competitors)[:: 1 if turn % 2 else -1]:
            competitors[name].sample(lead_in)
    return {name: median(one.samples[1:] or one.samples) for name, one in competitors.items()}


def our_calls(record: Record, problem: Problem, sets: OperandSets, here: machine.Machine) -> Calls:
    """Our tuned kernel on each copy; none where a library won."""
    if not brings_kernels(record.config):
        return []
    launch = prepare_launches([record], here.target, ArtifactCache(settings.cache_folder()))[record.problem]
    if isinstance(launch, str):
        print(f"{problem.key}: {launch}")
        return []
    return list(sets.prepare(LaunchCandidate(record.config, launch), min(sets.copies, MOST_COPIES)).calls)


def quantising_calls(problem: Problem, sets: OperandSets, here: machine.Machine) -> Calls:
    """The kernel that writes A and its factors from bf16, on each copy."""
    asked = quantization_of(problem)
    assert asked is not None, problem.key
    helper, arguments = choose_kernel(asked)
    artifact = helpers.compile_helper(helper, here.target, ArtifactCache(settings.cache_folder()))
    launch = helpers.launch_helper(artifact, helper, arguments, here.target)
    function = sets.device.load(launch.read_code()).function(launch.symbol)
    calls: Calls = []
    for operands in sets.sets[: min(sets.copies, MOST_COPIES)]:
        x = torch.randn(problem.m, problem.k, device="cuda").to(torch.bfloat16)
        operands["x"] = x  # it lives as long as what it is quantised into
        addresses = {"x": x.data_ptr(), "q": operands["a"].data_ptr(), "scale": operands["scale_a"].data_ptr()}
        start = prepare_launch(function, launch, tensor_map_makers(sets.device, launch), addresses).launch
        calls.append(partial(start, sets.stream))
    return calls


def best_of_library(problem: Problem, sets: OperandSets, most: int) -> Competitor | None:
    """The fastest of cuBLASLt's algorithms; None where it has none for the problem."""
    copies, found = min(sets.copies, MOST_COPIES), dict[str, Competitor]()
    try:
        library = registry.get(LibraryBackend, "blaslt")
        for config in library.list_algorithms(problem, sets.sets[0], most):
            if calls := sets.library_calls("blaslt", copies, config):
                found[config.name] = Competitor(sets, calls)
    except (TritonGemmError, RuntimeError) as error:
        print(f"{problem.key}: cuBLASLt: {str(error).splitlines()[0][:100]}")
    if not found:
        return None
    times = race(found, 4)
    best = found.pop(min(times, key=lambda name: times[name]))
    for other in found.values():
        other.graph.destroy()
    best.samples.clear()
    return best


def compare(
    m: int, n: int, k: int, args: argparse.Namespace, known: dict[Problem, Record], here: machine.Machine, fp8: str
) -> dict[str, float]:
    """Race all competitors of one size; the gains by what they are over."""
    entries: dict[str, Competitor] = {}
    errors, apart = [], {}
    plain = make_problem("bf16", m, n, k, fp8)
    stream = torch.cuda.current_stream().cuda_stream
    sets = make_operands(plain, here, stream)
    entries["torch bf16"] = Competitor(sets, sets.library_calls("torch", min(sets.copies, MOST_COPIES)))
    if plain in known and (calls := our_calls(known[plain], plain, sets, here)):
        entries["ours bf16"] = Competitor(sets, calls)
    for kind in args.kinds:
        problem = make_problem(kind, m, n, k, fp8)
        if problem not in known:
            print(f"{problem.key}: no row")
            continue
        sets = make_operands(problem, here, stream)
        calls = our_calls(known[problem], problem, sets, here)
        if not calls:
            continue
        quantising = quantising_calls(problem, sets, here)
        # Each pair is one call: the product reads what was just written, as in a model.
        pairs: Calls = [partial(_both, one, other) for one, other in zip(quantising, calls, strict=True)]
        pairs[0]()
        torch.cuda.synchronize()
        exact = sets.family.reference(problem, sets.sets[0])
        errors.append(f"{kind} {verify.deviation(sets.sets[0]['c'], exact):.1e}")
        entries |= {f"{kind} both": Competitor(sets, pairs), f"{kind} quantise": Competitor(sets, quantising)}
        entries[kind] = Competitor(sets, calls)
        if args.algorithms and (best := best_of_library(problem, sets, args.algorithms)):
            entries[f"{kind} cublaslt"] = best
        apart[kind] = known[problem].config.short_name
    times = race(entries)
    for one in entries.values():
        one.graph.destroy()
    bf16 = min(us for name, us in times.items() if name.endswith("bf16"))
    gains = {f"{kind} over bf16": bf16 / times[f"{kind} both"] for kind in apart}
    gains |= {f"{kind} over cublaslt": times[f"{kind} cublaslt"] / times[kind] for kind in apart
              if f"{kind} cublaslt" in times}  # fmt: skip
    said = "  ".join(f"{name} {us:.2f}" for name, us in times.items())
    gains_text = ", ".join(f"{name} {gain:.3f}" for name, gain in gains.items())
    print(f"{n:5} x {k:5}  M {m:5}  {said}  |  {gains_text}  |  errors {', '.join(errors)}  {apart}", flush=True)
    torch.cuda.empty_cache()
    return gains


def _both(quantise: Callable[[], object], multiply: Callable[[], object]) -> None:
    quantise()
    multiply()


def main() -> int:
    """Tune what is missing, race every size and print the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["row", "block"])
    parser.add_argument(
        "--sizes", type=read_shapes, default=[(2112, 7168), (7168, 2048), (4096, 7168), (24576, 1536), (7168, 16384)]
    )
    parser.add_argument("--m", type=read_numbers, default=[16, 64, 128, 256, 1024, 4096])
    parser.add_argument("--rows", type=Path, default=Path("output/quantized_rows.yaml"))
    parser.add_argument("--tune-options", default="--libtype triton --budget 60s")
    parser.add_argument("--algorithms", type=int, default=32, help="of cuBLASLt's that are tried; 0 for none")
    args = parser.parse_args()
    here = machine.find_machine(None)
    if not here.devices:
        raise SystemExit("no GPU here")
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    fp8 = "fp8e4m3fnuz" if here.target.fp8 == "fnuz" else "fp8e4m3fn"
    sizes = [(m, n, k) for n, k in args.sizes for m in args.m]
    wanted = [make_problem(kind, *size, fp8) for kind in ("bf16", *args.kinds) for size in sizes]
    known = tune(wanted, args.rows, shlex.split(args.tune_options))
    gains: dict[str, list[float]] = defaultdict(list)
    with torch.cuda.stream(torch.cuda.Stream()):
        for m, n, k in sizes:
            for name, gain in compare(m, n, k, args, known, here, fp8).items():
                gains[f"{name}, M {'below' if m < FEW_ROWS else 'from'} {FEW_ROWS}"].append(gain)
    for name, found in gains.items():
        print(f"{name}: geometric mean {geometric_mean(found):.3f}, least {min(found):.3f}, of {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
