"""A transformers model, captured, tuned and served without a change: its steps beside PyTorch's; on one GPU.

    python benchmarks/served_model.py [--model llama|qwen2|qwen3-moe|mixtral, or one of them with -fp8] [--layers 8]
        [--decode 1,16,64] [--prefill 512,2048] [--other-decode 13,37,100] [--other-prefill 777] [--compiled 16]
        [--rows TUNED.yaml] [--tune-options "--budget 30s"] [--apart]

The model has random weights and the widths of Llama 3 8B, Qwen 2.5 7B, Qwen 3 30B-A3B or Mixtral 8x7B. With -fp8 its
linear layers and experts are transformers' own of fp8 in blocks of 128 x 128, quantised from the weights of the bf16
model, which is what they are compared with. Its steps at the first numbers of tokens are captured with
`tritongemm.capture`, tables over M are tuned for what was captured, and `tritongemm.patch` serves them. Then each step,
of these and of the other numbers of tokens, is replayed from CUDA graphs, PyTorch's of bf16 and ours, in turns; with
--compiled, of these also as torch.compile makes them, where no layers are joined. A third column is of the fp8 model
as transformers runs it, where that has its kernels, or else with PyTorch's products behind our quantisation (of models
without experts). A decode step is of one token of each sequence without its past, a prefill of one sequence. The gain
that the rows predict is printed beside the one measured: what their times save against the library's, or, of fp8,
against PyTorch's bf16 products, which are timed alone, as the quantisation is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _common import command_environment, gpu_seconds, read_numbers
from _served_models import FP8, make_model, names, restore, serve_all, to_fp8
from _served_prediction import predict_saved

import tritongemm
from tritongemm.serving.loaded_tables import read_table

REPLAYS, ROUNDS = 20, 15
Shape = tuple[int, int]  # of a step: sequences, and tokens of each


def make_step(model: Any, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    """A step of some sequences and tokens of each; it gives the logits of the last tokens."""
    words = torch.randint(0, 1000, (batch, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(batch))

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=words, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


class Replay(NamedTuple):
    """A graph of a step.

    Attributes:
        graph: of its kernels.
        out: the logits that it gives.
        step: kept, since the graph reads its tokens.
    """

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    step: Callable[[], torch.Tensor]


def to_graph(step: Callable[[], torch.Tensor]) -> Replay:
    """A graph of a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return Replay(graph, out, step)


def race(graphs: Sequence[Replay]) -> list[float]:
    """Median seconds of a replay of each, in turns."""
    samples: list[list[float]] = [[] for _ in graphs]
    for round_ in range(ROUNDS):
        for place in range(len(graphs))[:: 1 if round_ % 2 else -1]:
            graph = graphs[place].graph
            graph.replay()
            samples[place].append(gpu_seconds(graph.replay, REPLAYS) / REPLAYS)
    return [median(times) for times in samples]


def tune(folder: Path, steps: Sequence[Callable[[], torch.Tensor]], options: Sequence[str]) -> tuple[Path, float]:
    """Capture steps and tune what they called; the results' file, and the seconds that tuning took."""
    with tritongemm.capture(folder / "shapes.yaml"):
        for step in steps:
            step()
    torch.cuda.empty_cache()
    results = folder / "tuned.yaml"
    command = [sys.executable, "-m", "tritongemm.tune", "--workload", str(folder / "shapes.yaml"), "-o", str(results)]
    command += options
    started = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env=command_environment())
    return results, time.perf_counter() - started


def graphs_of_fp8(fp8: Any, steps: dict[Shape, Callable[[], torch.Tensor]]) -> dict[Shape, Replay]:
    """Graphs of an fp8 model's steps before it is patched; none where nothing but our kernels runs it."""
    try:
        return {shape: to_graph(step) for shape, step in steps.items()}
    except (ImportError, NotImplementedError, OSError, RuntimeError) as error:
        print(f"transformers' own fp8 does not run here: {str(error).splitlines()[0][:100]}", flush=True)
    if any(type(module).__name__ == "FP8Experts" for module in fp8.modules()):
        return {}
    serve_all(fp8)
    try:
        return {shape: to_graph(step) for shape, step in steps.items()}
    finally:
        restore(fp8)


def read_arguments() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=names())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    for name, default in (("decode", "1,16,64"), ("prefill", "512,2048"), ("other-decode", "13,37,100")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--other-prefill", default="777")
    parser.add_argument("--compiled", default="", help="decode batches that are compared under torch.compile too")
    parser.add_argument("--rows", type=Path, help="results to serve, or shipped, instead of capturing and tuning")
    parser.add_argument("--tune-options", default="", help="further options of tritongemm tune, in one text")
    parser.add_argument("--apart", action="store_true", help="join no layers of one input")
    parser.add_argument("--keep", type=Path, help="copy the captured sizes and the results there")
    return parser.parse_args()


def shapes(decode: str, prefill: str) -> list[Shape]:
    """The steps of these batches that decode, and of these numbers of tokens that are filled in."""
    return [(batch, 1) for batch in read_numbers(decode)] + [(1, tokens) for tokens in read_numbers(prefill)]


@torch.no_grad()
def main() -> None:
    """Capture, tune, serve, and print each step's times."""
    args = read_arguments()
    captured = shapes(args.decode, args.prefill)
    every = [*captured, *shapes(args.other_decode, args.other_prefill)]
    plain = make_model(args.model, args.layers, args.vocabulary)
    is_fp8 = args.model.endswith(FP8)
    model = to_fp8(plain) if is_fp8 else plain
    third = graphs_of_fp8(model, {shape: make_step(model, *shape) for shape in every}) if is_fp8 else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = args.rows or tuned_results(model, is_fp8, captured, folder, args.tune_options.split())
        if args.keep:
            keep([results, folder / "shapes.yaml"], args.keep)
        patch = tritongemm.patch(model, results, join=not args.apart)
        print(patch)
        rows = list(read_table(results).records)
        title = f"{'step':<14} {'bf16 torch us':>13} {'fp8 theirs us':>13} {'ours us':>9} {'ratio':>6} {'predicted':>9}"
        print(f"{title}  {'logits differ by':>16}")
        for shape in every:
            compiled_too = shape[1] == 1 and shape[0] in read_numbers(args.compiled)
            for is_compiled in (False, True) if compiled_too else (False,):
                with patch.paused() if model is plain else nullcontext():
                    theirs = to_graph(new_step(plain, shape, is_compiled))
                ours = to_graph(new_step(model, shape, is_compiled))
                saved = predict_saved(model, plain, shape, rows, () if is_compiled else patch.joined)
                beside = None if is_compiled else third.get(shape)
                print_step(f"{step_name(*shape)}{' c' if is_compiled else ''}", theirs, ours, beside, saved)


def tuned_results(model: Any, is_fp8: bool, steps: Sequence[Shape], folder: Path, options: Sequence[str]) -> Path:
    """The file of results that tuning what these steps of a model call gives; prints how long it took."""
    if is_fp8:
        serve_all(model)
    results, seconds = tune(folder, [make_step(model, *shape) for shape in steps], options)
    if is_fp8:
        restore(model)
    print(f"tuned in {seconds:.1f} s")
    return results


def keep(files: Sequence[Path], folder: Path) -> None:
    """Copy the files that are there into a folder, where they are in another."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.exists() and file.parent != folder:
            (folder / file.name).write_bytes(file.read_bytes())


def new_step(model: Any, shape: Shape, is_compiled: bool) -> Callable[[], torch.Tensor]:
    """A step of a model, with nothing left of what torch.compile made before."""
    torch._dynamo.reset()
    step = make_step(model, *shape)
    return torch.compile(step) if is_compiled else step


def print_step(name: str, theirs: Replay, ours: Replay, beside: Replay | None, saved: float) -> None:
    """Race the graphs of a step and print its line.

    Args:
        name: of the step.
        theirs: PyTorch's in bf16.
        ours: served.
        beside: the fp8 model as transformers runs it, where that runs.
        saved: seconds that rows predict to be saved.
    """
    theirs_s, ours_s, *rest = race([theirs, ours, *([beside] if beside else [])])
    theirs.graph.replay()
    ours.graph.replay()
    torch.cuda.synchronize()
    error = ((ours.out.float() - theirs.out.float()).norm() / theirs.out.float().norm()).item()
    of_beside = f"{rest[0] * 1e6:13.1f}" if rest else f"{'-':>13}"
    text = f"{name:<14} {theirs_s * 1e6:13.1f} {of_beside} {ours_s * 1e6:9.1f} {theirs_s / ours_s:6.3f}"
    print(f"{text} {theirs_s / (theirs_s - saved):9.3f}  {error:16.1e}", flush=True)


def step_name(batch: int, tokens: int) -> str:
    """What a step is called in the table."""
    return f"{'decode' if tokens == 1 else 'prefill'} {batch * tokens}"


if __name__ == "__main__":
    main()
