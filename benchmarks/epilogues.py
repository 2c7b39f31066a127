"""Gate and up with SiLU(gate) * up, stored as it is or in fp8: by one kernel, and by two; on one GPU, in one process.

    python benchmarks/epilogues.py [--layers 28672x4096,14336x8192,51200x5120] [--m 1,16,64,128,256,512,1024,4096,8192]
        [--rows TUNED.yaml] [--tune-options "--budget 60s --compare"] [--json OUT]

Layers are N of gate and up together, and K. Rows that --rows lacks are tuned into it first: the product alone, with
`silu_mul`, and with `silu_mul_block`. Then these take turns, each in a CUDA graph, on the same operands in copies
larger than the last-level cache, and rest as races do: the tuned kernel of each epilogue, and the products of PyTorch
and of the tuned row, alone and followed by one kernel: that of ``torch.compile``, and ours. Results are bf16, fp8 with
a factor for each 128 columns, or fp8 with one for each row, which no kernel of a product writes: there one kernel for
gate, up and SiLU is followed by one that quantises. Printed are medians in microseconds, and the best two steps over
what is ours.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from _common import make_operands, read_numbers, read_shapes
from quantized import MOST_COPIES, ROUNDS, Calls, Competitor, make_problem, our_calls, tune

import tritongemm
from tritongemm.build.prepare import brings_kernels
from tritongemm.core.epilogues import RUN
from tritongemm.core.problem import Operand, Problem
from tritongemm.core.record import Record
from tritongemm.hip_ext import machine
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets
from tritongemm.numerics import epilogues
from tritongemm.serving.mixtures import steps_for

FP8 = torch.float8_e4m3fn
KINDS = {"": "silu_mul", "block": "silu_mul_block", "row": "silu_mul"}  # the epilogue that comes closest to a result
Finish = Callable[[torch.Tensor, Any], object]


def problems_of(m: int, n: int, k: int) -> dict[str, Problem]:
    """The product alone, and with each epilogue."""
    plain = make_problem("bf16", m, n, k, "")
    return {
        "none": plain,
        "silu_mul": replace(plain, epilogue="silu_mul"),
        "silu_mul_block": replace(plain, epilogue="silu_mul_block", c=Operand("fp8e4m3fn")),
    }


def finish(y: torch.Tensor, into: tuple[torch.Tensor, Any], kind: str) -> None:
    """SiLU(gate) * up of a product, as a user of PyTorch writes it: into a result, or numbers and factors."""
    done = epilogues.apply("silu_mul", y.float())
    result, factors = into
    if kind == "block":
        result_, found = epilogues.quantize(done, FP8)
        factors.copy_(found)
        result.copy_(result_)
    elif kind == "row":
        found = done.abs().amax(-1) / torch.finfo(FP8).max
        factors.copy_(found)
        result.copy_((done / found[:, None]).to(FP8))
    else:
        result.copy_(done)


torch._dynamo.config.recompile_limit = 1000  # one for each N and kind, and one more for a single row
COMPILED = {kind: torch.compile(partial(finish, kind=kind), dynamic=False) for kind in KINDS}


def step_calls(kind: str, y: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The second step of two by ``torch.compile``, and by our kernel."""
    m, columns = y.shape[0], y.shape[1] // 2
    result = torch.empty((m, columns), device="cuda", dtype=FP8 if kind else y.dtype)
    shapes = {"": None, "block": (columns // 128, m), "row": (m,)}
    factors = torch.empty(shapes[kind] or (1,), device="cuda")
    for one in (y, result):
        torch._dynamo.maybe_mark_dynamic(one, 0)
    torch._dynamo.maybe_mark_dynamic(factors, 1 if kind == "block" else 0)
    steps, own = steps_for(y), torch.cuda.MemPool()
    into = (result, factors if kind else None)

    def compiled() -> None:
        with torch.cuda.use_mem_pool(own):  # what a compiled reduction allocates stays the graph's
            COMPILED[kind](y, (result, factors))

    return {"compile": compiled, "ours": lambda: steps.activate(y, "silu", kind, result.dtype, run=RUN, into=into)}


def quantise_call(y: torch.Tensor) -> Callable[[], object]:
    """The kernel that quantises rows of a result."""
    own = torch.cuda.MemPool()

    def call() -> None:
        with torch.cuda.use_mem_pool(own):
            tritongemm.quantize(y, "row")

    return call


def in_turn(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    """One call of both."""

    def both() -> None:
        first()
        second()

    return both


def product_calls(record: Record, sets: OperandSets, here: machine.Machine) -> dict[str, Calls]:
    """PyTorch's product on each copy, and the tuned one."""
    copies, config = min(sets.copies, MOST_COPIES), record.config
    found = {"torch": sets.library_calls("torch", copies)}
    if brings_kernels(config):
        found["tuned"] = our_calls(record, record.problem, sets, here)
    elif config.backend != "torch":
        found["tuned"] = sets.library_calls(config.backend, copies, config)
    return {name: calls for name, calls in found.items() if calls}


def race(entries: dict[str, Competitor]) -> dict[str, float]:
    """Median microseconds of each, which take turns and rest."""
    lead_in = LeadInKernel("cuda")
    for turn in range(ROUNDS):
        for name in list(entries)[:: 1 if turn % 2 else -1]:
            entries[name].sample(lead_in)
            entries[name].sets.rest(entries[name].samples[-1] * entries[name].launches / 1e6)
    return {name: median(one.samples[1:]) for name, one in entries.items()}


def compare(m: int, n: int, k: int, known: dict[Problem, Record], here: machine.Machine) -> dict[str, float]:
    """Race all forms of one size; their times."""
    wanted = problems_of(m, n, k)
    if missing := [p.key for p in wanted.values() if p not in known]:
        print(f"no row of {', '.join(missing)}", flush=True)
        return {}
    stream = torch.cuda.current_stream().cuda_stream
    entries: dict[str, Competitor] = {}
    of_plain = make_operands(wanted["none"], here, stream)
    for name, calls in product_calls(known[wanted["none"]], of_plain, here).items():
        entries[name] = Competitor(of_plain, calls)
        for kind in KINDS:
            steps = [step_calls(kind, of_plain.sets[i]["c"]) for i in range(len(calls))]
            for step in steps[0]:
                both = [in_turn(call, each[step]) for call, each in zip(calls, steps, strict=True)]
                entries[f"{name}+{step}{kind and '_' + kind}"] = Competitor(of_plain, both)
    for epilogue in ("silu_mul", "silu_mul_block"):
        sets = make_operands(wanted[epilogue], here, stream)
        for own, shared in zip(sets.sets, of_plain.sets, strict=False):  # where weights are in memory matters
            own |= {name: shared[name] for name in ("a", "b")}
        if calls := our_calls(known[wanted[epilogue]], wanted[epilogue], sets, here):
            entries[epilogue] = Competitor(sets, calls)
            if epilogue == "silu_mul":
                quantise = [quantise_call(one["c"]) for one in sets.sets[: len(calls)]]
                entries["silu_mul+row"] = Competitor(sets, [*map(in_turn, calls, quantise)])
    times = race(entries)
    for one in entries.values():
        one.graph.destroy()
    torch.cuda.empty_cache()
    return times


def gains_of(times: dict[str, float]) -> dict[str, float]:
    """By kind of result: the best two steps over one kernel, and over the faster of what is ours."""
    gains = {}
    for kind, epilogue in KINDS.items():
        behind = kind and f"_{kind}"
        compiled = [us for name, us in times.items() if name.endswith(f"+compile{behind}")]
        ours = [us for name, us in times.items() if name.endswith(f"+ours{behind}")]
        one = times.get("silu_mul+row" if kind == "row" else epilogue)
        two, said = min(compiled), kind or "bf16"
        if one:
            gains[f"{said}, one kernel over the best product and torch.compile"] = two / one
            gains[f"{said}, one kernel over the best two steps, ours too"] = min(two, *ours) / one
        gains[f"{said}, the faster of ours over the best product and torch.compile"] = two / min(one or two, *ours)
        gains[f"{said}, the faster of ours over PyTorch"] = times[f"torch+compile{behind}"] / min(one or two, *ours)
    gains["product alone over one kernel"] = min(times["torch"], times.get("tuned", times["torch"])) / times["silu_mul"]
    return gains


def main() -> int:
    """Tune what is missing, race every size and print the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=read_shapes, default=[(28672, 4096), (14336, 8192), (51200, 5120)])
    parser.add_argument("--m", type=read_numbers, default=[1, 16, 64, 128, 256, 512, 1024, 4096, 8192])
    parser.add_argument("--rows", type=Path, default=Path("output/epilogue_rows.yaml"))
    parser.add_argument("--tune-options", default="--budget 60s --compare")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    here = machine.find_machine(None)
    if not here.devices:
        raise SystemExit("no GPU here")
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    sizes = [(m, n, k) for n, k in args.layers for m in args.m]
    known = tune([p for size in sizes for p in problems_of(*size).values()], args.rows, shlex.split(args.tune_options))
    gains: dict[str, list[float]] = defaultdict(list)
    written = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for size in sizes:
            times = compare(*size, known, here)
            if not times:
                continue
            written.append({"size": size, **times})
            if args.json:
                args.json.write_text(json.dumps(written))
            print("x".join(map(str, size)), " ".join(f"{name} {us:.2f}" for name, us in times.items()), flush=True)
            for name, gain in gains_of(times).items():
                gains[name].append(gain)
    for name, found in gains.items():
        print(f"{name}: geometric mean {geometric_mean(found):.3f}, least {min(found):.3f}, of {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
