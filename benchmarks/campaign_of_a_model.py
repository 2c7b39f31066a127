"""A campaign from a captured transformers model: the uplift that it reports beside the one measured on the model.

    python benchmarks/campaign_of_a_model.py [--model llama|qwen2] [--layers 8] [--decode 1,16,64] [--prefill 512,2048]
        [--optimize-options "--budget 24"]

The steps of `served_model.py` are captured once each, and `tritongemm optimize` makes a campaign of what
they called. Its time-weighted uplift is the share of the GEMM time that the kept kernels save. Then `tritongemm.patch`
serves the campaign's library in the model, layer by layer, and each step is replayed from CUDA graphs with and without
it, in turns. What was measured is what all steps save, over the time of PyTorch's GEMM kernels by its profiler.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import _common
import torch
from _served_models import FP8, make_model, names
from served_model import make_step, race, shapes, step_name, to_graph

import tritongemm

_GEMM = re.compile(r"gemm|gemv|nvjet|splitk|cutlass|Cijk", re.IGNORECASE)  # names of libraries' kernels
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)
_WEIGHTED = re.compile(r"time-weighted uplift ([\d.]+)%")


def gemm_seconds(steps: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Seconds of the GEMM kernels that one pass over steps launches."""
    for step in steps:
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for step in steps:
            step()
        torch.cuda.synchronize()
    kernels = [e for e in profile.key_averages() if _GEMM.search(e.key) and not _ATTENTION.search(e.key)]
    return float(sum(e.self_device_time_total for e in kernels)) / 1e6


def make_campaign(folder: Path, steps: Sequence[Callable[[], torch.Tensor]], options: Sequence[str]) -> float:
    """Capture steps and make a campaign of them in a folder; the share of the GEMM time that it says is saved."""
    log = folder / "job.yaml"
    with tritongemm.capture(log):
        for step in steps:
            step()
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "tritongemm", "optimize", str(log), "-o", str(folder / "tunings"), *options]
    environment = _common.command_environment()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    done.check_returncode()
    return float(_WEIGHTED.findall(done.stdout)[-1]) / 100


@torch.no_grad()
def main() -> None:
    """Capture, make the campaign, serve its library, and print both uplifts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = [name for name in names() if not name.endswith(FP8)]
    parser.add_argument("--model", default="llama", choices=plain)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--decode", default="1,16,64")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--optimize-options", default="", help="further options of tritongemm optimize, in one text")
    args = parser.parse_args()
    model = make_model(args.model, args.layers, args.vocabulary)
    every = shapes(args.decode, args.prefill)
    steps = [make_step(model, *shape) for shape in every]
    gemms = gemm_seconds(steps)
    theirs = [to_graph(step) for step in steps]
    with tempfile.TemporaryDirectory() as temporary:
        predicted = make_campaign(Path(temporary), steps, args.optimize_options.split())
        patched = tritongemm.patch(model, Path(temporary) / "tunings" / "final", join=False)
        print(patched)
        saved = 0.0
        for shape, step, before in zip(every, steps, theirs, strict=True):
            seconds, own = race([before, to_graph(step)])
            saved += seconds - own
            print(f"{step_name(*shape):<14} PyTorch {1e6 * seconds:9.1f} us, with the library {1e6 * own:9.1f} us")
    measured = saved / gemms
    print(
        f"GEMM time of all steps {1e3 * gemms:.3f} ms; saved of it: predicted {predicted:.2%}, measured {measured:.2%}"
    )
    print(f"GEMMs run {1 / (1 - predicted):.3f} times as fast by prediction, {1 / (1 - measured):.3f} as measured")


if __name__ == "__main__":
    main()
