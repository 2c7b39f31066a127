"""A transformers model, captured, tuned and served without a change: its steps beside PyTorch's; on one GPU.

    python benchmarks/served_model.py [--model llama|qwen2] [--layers 8] [--decode 1,16,64] [--prefill 512,2048]
        [--other-decode 13,37,100] [--other-prefill 777] [--compiled 16] [--rows TUNED.yaml] [--apart]

The model has random weights and the widths of Llama 3 8B or Qwen 2.5 7B. Its steps at the first numbers of tokens are
captured with `tritongemm.capture`, tables over M are tuned for what was captured, and `tritongemm.patch` serves them.
Then each step, of these and of the other numbers of tokens, is replayed from two CUDA graphs, PyTorch's and ours, in
turns; with --compiled, of these also as torch.compile makes them, where no layers are joined. A decode step is of one
token of each sequence without its past, a prefill of one sequence. The gain that the rows predict is printed beside the
one measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import ROOT

import tritongemm
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.runtime import machine
from tritongemm.serving.record_table import RecordTable
from tritongemm.workloads import sizes
from tritongemm.workloads.sibling_layers import saved_seconds

WIDTHS = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
}
REPLAYS, ROUNDS = 20, 15


def make_model(kind: str, layers: int, vocabulary: int) -> Any:
    """The model, of random weights in bf16 on the GPU."""
    import transformers

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = model(config(**WIDTHS[kind], num_hidden_layers=layers, vocab_size=vocabulary))
    torch.set_default_dtype(torch.float32)
    return made.eval()


def make_step(model: Any, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """A step of so many sequences and tokens of each; it gives the logits of the last tokens."""
    words = torch.randint(0, 1000, (batch, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(batch))

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=words, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


def to_graph(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a step, and what it gives."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def race(first: torch.cuda.CUDAGraph, second: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Median seconds of a replay of each, in turns."""
    samples: tuple[list[float], list[float]] = ([], [])
    for round_ in range(ROUNDS):
        for place in (0, 1) if round_ % 2 else (1, 0):
            graph = (first, second)[place]
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            samples[place].append(begin.elapsed_time(end) / 1e3 / REPLAYS)
    return median(samples[0]), median(samples[1])


def predict_saved(model: Any, m: int, tokens: int, rows: RecordTable, joined: Sequence[tuple[str, ...]]) -> float:
    """Seconds of a step that the rows of a model's linear layers say are saved.

    Args:
        model: the model.
        m: rows of most layers.
        tokens: of each sequence, the last of which alone comes to the LM head.
        rows: the tuned records.
        joined: groups of layers that are computed together where that is faster.
    """
    here, saved = machine.find_machine(None).target, 0.0

    def record_of(layers: Sequence[torch.nn.Linear], last: int) -> Record | None:
        n, k, bias = sum(w.out_features for w in layers), layers[0].in_features, layers[0].bias
        of = Problem(last, n, k, "bf16", "bf16", "bf16", row_major_b=False, bias="none" if bias is None else "n")
        found = rows.find(of, here.name, here.compute_units)
        return found if isinstance(found, Record) else None

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            record = record_of([layer], m // tokens if name == "lm_head" else m)
            if record is not None and record.library_seconds:
                saved += record.library_seconds - record.served_seconds
    for group in joined:
        layers = [model.get_submodule(name) for name in group]
        records = [record_of(part, m) for part in (layers, *([layer] for layer in layers))]
        found = [record for record in records if record is not None]
        if len(found) == len(records):
            seconds = [record.served_seconds for record in found]
            saved += saved_seconds(replace(found[0].problem, m=m), seconds[0], seconds[1:])
    return saved


def tune(folder: Path, steps: Sequence[Callable[[], torch.Tensor]]) -> tuple[Path, float]:
    """Capture steps and tune what they called; the results' file, and the seconds that tuning took."""
    with tritongemm.capture(folder / "shapes.yaml"):
        for step in steps:
            step()
    torch.cuda.empty_cache()
    results = folder / "tuned.yaml"
    command = [sys.executable, "-m", "tritongemm.tune", "--workload", str(folder / "shapes.yaml"), "-o", str(results)]
    started = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return results, time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    """Capture, tune, serve, and print each step's times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=sorted(WIDTHS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    for name, default in (("decode", "1,16,64"), ("prefill", "512,2048"), ("other-decode", "13,37,100")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--other-prefill", default="777")
    parser.add_argument("--compiled", default="", help="decode batches that are compared under torch.compile too")
    parser.add_argument("--rows", type=Path, help="results to serve, instead of capturing and tuning")
    parser.add_argument("--apart", action="store_true", help="join no layers of one input")
    parser.add_argument("--keep", type=Path, help="copy the captured sizes and the results there")
    args = parser.parse_args()

    def shapes(decode: str, prefill: str) -> list[tuple[int, int]]:
        return [(int(b), 1) for b in decode.split(",") if b] + [(1, int(t)) for t in prefill.split(",") if t]

    captured = shapes(args.decode, args.prefill)
    model = make_model(args.model, args.layers, args.vocabulary)
    with tempfile.TemporaryDirectory() as temporary:
        if args.rows:
            results = args.rows
        else:
            results, seconds = tune(Path(temporary), [make_step(model, *shape) for shape in captured])
            print(f"tuned in {seconds:.1f} s")
        if args.keep:
            for file in (results, Path(temporary) / "shapes.yaml"):
                (args.keep / file.name).write_bytes(file.read_bytes())
        patch = tritongemm.patch(model, results, join=not args.apart)
        print(patch)
        rows = RecordTable(r.record for r in sizes.from_file(results, Defaults()) if r.record)
        print(f"{'step':<14} {'torch us':>9} {'ours us':>9} {'ratio':>6} {'predicted':>9}  {'logits differ by':>16}")
        for batch, tokens in [*captured, *shapes(args.other_decode, args.other_prefill)]:
            step = make_step(model, batch, tokens)
            compiled = [False, True] if tokens == 1 and str(batch) in args.compiled.split(",") else [False]
            for is_compiled in compiled:
                torch._dynamo.reset()
                with patch.paused():
                    theirs, wanted = to_graph(torch.compile(step) if is_compiled else step)
                torch._dynamo.reset()
                ours, given = to_graph(torch.compile(step) if is_compiled else step)
                theirs_s, ours_s = race(theirs, ours)
                theirs.replay()
                ours.replay()
                torch.cuda.synchronize()
                error = ((given.float() - wanted.float()).norm() / wanted.float().norm()).item()
                joined = () if is_compiled else patch.joined
                predicted = theirs_s / (theirs_s - predict_saved(model, batch * tokens, tokens, rows, joined))
                name = f"{'decode' if tokens == 1 else 'prefill'} {batch * tokens}{' c' if is_compiled else ''}"
                text = f"{name:<14} {theirs_s * 1e6:9.1f} {ours_s * 1e6:9.1f} {theirs_s / ours_s:6.3f} {predicted:9.3f}"
                print(f"{text}  {error:16.1e}", flush=True)


if __name__ == "__main__":
    main()
