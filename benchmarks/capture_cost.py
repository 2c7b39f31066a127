"""What a capture adds to the host time of a linear layer, of a product and of a complete call of a module.

    python -m benchmarks.capture_cost

Calls are timed with and without the capture in turns. On a GPU nothing waits for the kernels but between the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

import tritongemm


def main() -> None:
    """Print the host time of a call without and with the capture, in microseconds, and what it adds in percent."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--count", type=int, default=1000, help="calls a round makes of one kind (default 1000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layer = torch.nn.Linear(16, 16, bias=False, device=device).requires_grad_(False)
    x, w = torch.randn(4, 16, device=device), layer.weight
    cases: dict[str, Callable[[], object]] = {
        "functional.linear": lambda: functional.linear(x, w),
        "nn.Linear": lambda: layer(x),
        "torch.mm": lambda: torch.mm(x, w),
    }
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file, torch.no_grad():
        for name, call in cases.items():
            without, with_it = _in_turns(call, Path(file.name), args.rounds, args.count)
            print(f"{name:20} {without:8.3f} us {with_it:8.3f} us {100 * (with_it / without - 1):6.2f} %")


def _in_turns(call: Callable[[], object], path: Path, rounds: int, count: int) -> tuple[float, float]:
    without, with_it = list[float](), list[float]()
    for _ in range(rounds):
        without.append(_microseconds(call, count))
        with tritongemm.capture(path):
            for _ in range(3):  # the second call of a weight has it learnt
                call()
            with_it.append(_microseconds(call, count))
    return median(without), median(with_it)


def _microseconds(call: Callable[[], object], count: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count * 1e6


if __name__ == "__main__":
    main()
