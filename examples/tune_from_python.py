"""Tune sizes from Python, print them, and call the fastest kernels.

python examples/tune_from_python.py [--nk 4096 4096] [--target sm90] [--budget 32]

On a GPU the kernels are measured, and serve calls at once. Without one, or with another GPU's --target, times are
predicted, and PyTorch computes the calls.
"""

import argparse

import torch

import tritongemm

parser = argparse.ArgumentParser(description="Tune three sizes from Python.")
parser.add_argument("--nk", type=int, nargs=2, default=(4096, 4096), help="N and K of a linear layer")
parser.add_argument("--target", help="architecture (this machine's GPU)")
parser.add_argument("--budget", help="configs tried for each size, or seconds such as 60s")
parser.add_argument("-o", default="tuned.yaml", help="results file")
args = parser.parse_args()
n, k = args.nk

results = tritongemm.autotune(
    [(m, n, k) for m in (1, 16, 64)], target=args.target, budget=args.budget, output=args.o
)  # the same call continues after an interruption
print(results)
print(results.load())

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(16, k, device=device, dtype=torch.bfloat16)
w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
y = tritongemm.mm(x, w)  # x @ w.T
exact = x.double() @ w.double().T
print(f"largest error, of the largest element: {(y.double() - exact).abs().max() / exact.abs().max():.1e}")
print(tritongemm.explain(x, w))
