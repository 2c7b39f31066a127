"""A transformers model whose logits do not depend on the batch: bits compared, and steps timed beside plain PyTorch.

    python benchmarks/invariant_model.py [--model llama|qwen2] [--layers 8] [--batches 1,16,64] [--prompt 64]
        [--new-tokens 16] [--rows INVARIANT.yaml] [--tune-options "--budget 40s"]

The model has random weights and the widths of Llama 3 8B or Qwen 2.5 7B. What it multiplies at these batches is
captured, tuned with `tune --invariant=library`, and served by `patch(model, invariant=True)`. Then the first sequence
is decoded alone and in each batch, prompt and new tokens through a cache, and its logits are compared bit for bit; so
they are without the patch. Each decode step and the prefill of one sequence are replayed from CUDA graphs, PyTorch's
and ours, in turns.

Two operations beside the products depend on the batch in plain PyTorch, and are replaced in both models: the mean in
transformers' RMSNorm adds up in an order of the number of rows, where `torch.nn.functional.rms_norm` does not, and
attention is that of PyTorch's memory-efficient kernel, which takes no groups of heads, as FlashAttention splits keys by
the batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import read_numbers
from _served_models import make_model
from served_model import make_step, race, step_name, to_graph, tune
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations import sdpa_attention

import tritongemm


def fuse_norms(model: nn.Module) -> int:
    """Have each RMSNorm of a model computed by PyTorch's fused kernel; the number of them."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]

    def forward(norm: Any, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for kind in {type(norm) for norm in norms}:
        kind.forward = forward
    return len(norms)


def decode(model: Any, prompts: Tensor, new_tokens: int) -> Tensor:
    """The logits of the first sequence after its prompt and after each new token, the likeliest of each sequence."""
    words, past, found = prompts, None, list[Tensor]()
    for _ in range(new_tokens + 1):
        out = model(input_ids=words, past_key_values=past, use_cache=True, logits_to_keep=1)
        found.append(out.logits[0, -1].clone())
        words, past = out.logits[:, -1:].argmax(-1), out.past_key_values
    return torch.stack(found)


def compare(model: Any, batches: list[int], prompt: int, new_tokens: int, vocabulary: int) -> int:
    """Print how the first sequence's logits in each batch differ from those alone; the number of batches that do."""
    generator = torch.Generator("cuda").manual_seed(7)
    every = torch.randint(0, vocabulary, (max(batches), prompt), device="cuda", generator=generator)
    alone, differing = decode(model, every[:1], new_tokens), 0
    for batch in batches:
        found = decode(model, every[:batch], new_tokens)
        steps = int((found != alone).any(-1).sum())
        difference = float((found.float() - alone.float()).abs().max())
        print(
            f"  batch {batch:3}: {steps} of {len(found)} steps have other bits, by {difference:.2e} at most", flush=True
        )
        differing += bool(steps)
    return differing


def read_arguments() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=("llama", "qwen2"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batches", type=read_numbers, default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rows", type=Path, help="results to serve, instead of capturing and tuning")
    parser.add_argument("--tune-options", default="--budget 40s")
    parser.add_argument("--keep", type=Path, help="copy the results there")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    """Tune, compare bits, and print each step's times; 1 if a served sequence depends on its batch."""
    args = read_arguments()
    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
    model = make_model(args.model, args.layers, args.vocabulary)
    print(f"{fuse_norms(model)} norms")
    shapes = [(batch, 1) for batch in args.batches] + [(batch, args.prompt) for batch in args.batches]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), tempfile.TemporaryDirectory() as temporary:
        results = args.rows
        if results is None:
            options = ["--invariant=library", *args.tune_options.split()]
            results, seconds = tune(Path(temporary), [make_step(model, *shape) for shape in shapes], options)
            print(f"tuned in {seconds:.1f} s")
        if args.keep:
            (args.keep / "invariant_model.yaml").write_bytes(results.read_bytes())
        print("plain PyTorch:")
        compare(model, args.batches, args.prompt, args.new_tokens, args.vocabulary)
        patch = tritongemm.patch(model, results, invariant=True)
        print(f"{patch}:")
        differing = compare(model, args.batches, args.prompt, args.new_tokens, args.vocabulary)
        print(f"{'step':<14} {'torch us':>9} {'ours us':>9} {'ratio':>6}  logits differ by")
        for shape in shapes[: len(args.batches) + 1]:
            with patch.paused():
                theirs = to_graph(make_step(model, *shape))
            ours = to_graph(make_step(model, *shape))
            times = race([theirs, ours])
            apart = float((ours.out.float() - theirs.out.float()).norm() / theirs.out.float().norm())
            us = " ".join(f"{seconds * 1e6:9.1f}" for seconds in times)
            print(f"{step_name(*shape):<14} {us} {times[0] / times[1]:6.3f}  {apart:.1e}", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
