"""Serve a transformers model with tuned kernels, and generate with and without them.

python examples/serve_model.py [tuned.yaml] [--model meta-llama/Llama-3.1-8B]

Without a file the tables serve that come along in tritongemm. Without --model a small Llama of random weights is made,
so that nothing is downloaded. What has no row, and everything without a GPU, PyTorch computes.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import tritongemm

parser = argparse.ArgumentParser(description="Serve a transformers model with tuned kernels.")
parser.add_argument("results", nargs="?", help="file of tuned rows or library; the shipped tables if left out")
parser.add_argument("--model", help="name or folder of a model")
parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
args = parser.parse_args()

if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
else:
    small = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16)
model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
prompt = torch.arange(8, device=model.device)[None]


def generate() -> list[int]:
    """Generate tokens, and print how long one took."""
    begin = time.perf_counter()
    found: list[int] = model.generate(prompt, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False)[
        0
    ].tolist()
    print(f"{(time.perf_counter() - begin) / args.tokens * 1e3:.1f} ms a token")
    return found


with torch.no_grad():
    before = generate()
    patch = tritongemm.patch(model, args.results)
    print(patch)  # which layers are served, and why the others are not
    after = generate()
    patch.undo()
print(f"{sum(a == b for a, b in zip(before, after, strict=True))} of {len(before)} tokens agree")
