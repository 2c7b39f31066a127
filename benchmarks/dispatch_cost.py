"""What a call costs the host: `tritongemm.mm` beside `torch.nn.functional.linear`, in one process, on a GPU.

    python benchmarks/dispatch_cost.py

Sizes are so small that the GPU waits for the host; calls are queued, and waited for outside the measured time. A round
measures every contender once, in a new order; printed are medians over the rounds. "moving" operands change with every
call, as the layers of a model do, so that every address and tensor map is written anew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tritongemm
from tritongemm import settings
from tritongemm.config import Config
from tritongemm.hip_ext import driver
from tritongemm.problem import Problem
from tritongemm.record import Record

M, K = 16, 256
CONFIGS = {
    "tile": (256, Config("tile", 16, 64, 64, 1, 1, 4, 3)),
    "tile, split-K": (320, Config("tile", 16, 64, 64, 1, 2, 4, 3)),
    "tma": (384, Config("tma", 64, 64, 64, 1, 1, 4, 3)),
    "persistent": (512, Config("persistent", 64, 64, 64, 1, 1, 4, 3)),
}


def measure(calls: dict[str, Callable[[int], object]], rounds: int, count: int) -> dict[str, float]:
    """Median microseconds of a call of each contender."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=500, help="calls a round queues of one contender (default 500)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    vendor = driver.present()
    if vendor is None or not torch.cuda.is_available():
        parser.error("needs a GPU")
    device = driver.open(vendor).device()
    configs = {n: c for n, c in CONFIGS.items() if vendor == "nvidia" or c[1].template not in ("tma", "persistent")}
    toolchain = {"triton": settings.version("triton")}

    def record(n: int, config: Config, bias: str, winner: str = "triton") -> Record:
        problem = Problem(M, n, K, "bf16", "bf16", "bf16", row_major_b=False, bias=bias)
        return Record(problem, device.arch, config, winner, 1e-6, 0.0, "events", toolchain=toolchain, library="torch")

    records = [record(n, config, bias) for n, config in configs.values() for bias in ("none", "n")]
    start = time.perf_counter()
    tritongemm.load([*records, record(192, CONFIGS["tile"][1], "none", "torch")])
    seconds = time.perf_counter() - start

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    xs = [tensor(M, K) for _ in range(64)]
    weights = {n: [tensor(n, K) for _ in range(64)] for n in (128, 192, 256, 320, 384, 512)}
    biases = {n: tensor(n) for n in weights}
    calls: dict[str, Callable[[int], object]] = {}

    def add(name: str, n: int, function: Callable[..., object]) -> None:
        w, bias, x = weights[n], biases[n], xs[0]
        one = w[0]
        calls[name] = lambda i: function(x, one)
        calls[f"{name}, bias"] = lambda i: function(x, one, bias)
        calls[f"{name}, moving"] = lambda i: function(xs[i & 63], w[i & 63])

    add("linear", 256, functional.linear)
    for name, (n, config) in configs.items():
        said = tritongemm.explain(xs[0], weights[n][0])
        if not said.startswith(f"exact: {config.name}"):
            raise SystemExit(f"{name}: {said}")
        add(name, n, tritongemm.mm)
    add("library won", 192, tritongemm.mm)
    add("never tuned", 128, tritongemm.mm)
    for name in ("library won, bias", "library won, moving"):
        del calls[name]
    with torch.inference_mode():
        found = measure(calls, args.rounds, args.count)
    print(
        f"{device.name}, torch {torch.__version__}, triton {settings.version('triton')}; loading took {seconds:.1f} s"
    )
    print(f"{'contender':24} {'us':>7}  over linear")
    for name, us in found.items():
        kind = next((k for k in (", bias", ", moving") if name.endswith(k)), "")
        print(f"{name:24} {us:7.2f}  {us / found['linear' + kind]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
