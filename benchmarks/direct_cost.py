"""What PyTorch's kernels cost when `tritongemm.mm` calls them without PyTorch, beside `torch.nn.functional.linear`.

It is measured on the host, and on the GPU in captured graphs. Needs versions of which it is known what PyTorch calls.

    python benchmarks/direct_cost.py

Twenty sizes in bf16, fp16, float32 and tf32, with and without a bias. Host times only of the twelve small ones, whose
calls the GPU keeps up with.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from statistics import median

import torch
from _common import gpu_seconds
from dispatch_cost import measure
from torch.nn import functional

import tritongemm

SMALL = [(16, 256, 256), (16, 512, 512), (1, 1024, 1024), (64, 128, 512), (7, 333, 1000), (33, 100, 999)]
SMALL += [(2, 1280, 2048), (100, 256, 1024), (161, 164, 267), (8, 64, 8192), (64, 64, 4096), (256, 256, 512)]
LARGE = [(16, 1280, 8192), (64, 4096, 4096), (256, 1280, 8192), (192, 4096, 4096), (1024, 1280, 8192)]
LARGE += [(100, 7168, 8192), (777, 2560, 6912), (4, 8192, 1024)]
MODES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
ENOUGH = 100  # After this many calls of a size, PyTorch's kernel for it is called directly.
IN_GRAPH, REPLAYS = 20, 15
Call = Callable[[], object]


def on_gpu(calls: dict[str, Call]) -> dict[str, float]:
    """Median microseconds of a call, many of which are captured in one graph."""
    graphs = {}
    for name, call in calls.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(IN_GRAPH):
                call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-2, REPLAYS):  # the first two warm up
        for name in random.sample(list(calls), len(calls)):
            seconds = gpu_seconds(graphs[name].replay)
            if round_ >= 0:
                samples[name].append(seconds / IN_GRAPH * 1e6)
    return {name: median(values) for name, values in samples.items()}


def both(m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool) -> tuple[float | None, float]:
    """Host's and GPU's time of `mm` over that of `linear`; the former of small sizes only."""
    x, w = (torch.randn(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
    bias = torch.randn(n, device="cuda", dtype=dtype) if with_bias else None
    calls: dict[str, Call] = {"mm": lambda: tritongemm.mm(x, w, bias), "linear": lambda: functional.linear(x, w, bias)}
    said = tritongemm.explain(x, w, bias)
    if "called directly" not in said:
        raise SystemExit(f"nothing to compare: {said}")
    for _ in range(ENOUGH):
        for call in calls.values():
            call()
    gpu = on_gpu(calls)
    if (m, n, k) not in SMALL:
        return None, gpu["mm"] / gpu["linear"]
    host = measure({name: lambda i, call=call: call() for name, call in calls.items()}, 11, 200)
    return host["mm"] / host["linear"], gpu["mm"] / gpu["linear"]


def main() -> None:
    """Time each size in each mode and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; mm over linear")
    print(f"{'size':16} {'dtype':5} bias  host   GPU")
    for mode, dtype in MODES.items():
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        hosts, gpus = [], []
        for m, n, k in SMALL + LARGE:
            for bias in (False, True):
                with torch.inference_mode():
                    host, gpu = both(m, n, k, dtype, bias)
                hosts += [] if host is None else [host]
                gpus.append(gpu)
                shown = "    " if host is None else f"{host:.2f}"
                print(f"{f'{m}x{n}x{k}':16} {mode:5} {'yes' if bias else 'no':4}  {shown}  {gpu:.2f}", flush=True)
        print(f"{mode}: host {min(hosts):.2f} to {max(hosts):.2f}, GPU {min(gpus):.2f} to {max(gpus):.2f}")


if __name__ == "__main__":
    main()
