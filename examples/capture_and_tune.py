"""Record what a program multiplies, and tune tables that cover every M of it.

python examples/capture_and_tune.py [--width 4096] [--target sm90] [--budget 60s]

The command line does the same with any program, unchanged:

    tritongemm capture -o shapes.yaml app.py
    tritongemm tune --workload shapes.yaml -o tuned.yaml
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import tritongemm
from tritongemm.cli.arguments import budget
from tritongemm.tune.request import Devices, Outputs, SearchScope, SizeSource, TuneRequest

parser = argparse.ArgumentParser(description="Capture a program's sizes and tune them.")
parser.add_argument("--width", type=int, default=4096, help="width of the layers")
parser.add_argument("--target", help="architecture (this machine's GPU)")
parser.add_argument("--budget", type=budget, help="configs tried for each size, or seconds such as 60s")
parser.add_argument("-o", type=Path, default=Path("tuned.yaml"), help="results file")
args = parser.parse_args()
shapes = args.o.with_name("shapes.yaml")

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(args.width, 2 * args.width), nn.SiLU(), nn.Linear(2 * args.width, args.width))
model = model.to(device, torch.bfloat16)
with torch.no_grad(), tritongemm.capture(shapes):
    for tokens in (1, 1, 1, 4):
        model(torch.randn(tokens, args.width, device=device, dtype=torch.bfloat16))
print(shapes.read_text(encoding="utf-8"))

request = TuneRequest(
    sizes=SizeSource(path=shapes, is_workload=True),
    devices=Devices(target=args.target),
    search=SearchScope(budget=args.budget),
    outputs=Outputs(path=args.o),
)
results = tritongemm.autotune(request)
print(results)
print(tritongemm.patch(model, args.o))
