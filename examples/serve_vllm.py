"""Generate with vLLM, which finds the plug-in by itself and serves tuned kernels.

python examples/serve_vllm.py tuned.yaml MODEL

The same for a server: TRITONGEMM_CONFIG=tuned.yaml vllm serve MODEL. To record the sizes that vLLM multiplies, set
TRITONGEMM_CAPTURE=shapes.yaml instead, and tune with: tritongemm tune --workload shapes.yaml -o tuned.yaml
"""

import argparse
import os

parser = argparse.ArgumentParser(description="Generate with vLLM and tuned kernels.")
parser.add_argument("results", help="file of tuned rows, or a kernel library")
parser.add_argument("model", help="name or folder of a model")
args = parser.parse_args()

os.environ["TRITONGEMM_CONFIG"] = os.path.abspath(args.results)  # before vLLM starts its processes
os.environ.setdefault("TRITONGEMM_LOG", "config")  # log a line for each new size: what serves it

if __name__ == "__main__":  # vLLM's child processes import this file
    from vllm import LLM, SamplingParams

    engine = LLM(model=args.model)
    for output in engine.generate(["GEMM stands for"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.prompt, output.outputs[0].text)
