"""Run a server's own kernels in Triton's interpreter, on a CPU, and compare with float64.

usage: TRITON_INTERPRET=1 run_server_kernels.py BACKEND
"""

import sys

import triton.backends

from tests.support.nouns import Config, Family, Groups, LibraryBackend, Problem, UnavailableError, matrices, registry
from tritongemm.numerics.verify import deviation

FAMILY = registry.get(Family, "a8w8_blockscale")
SIZES = ((1, (33, 200, 384)), (1, (5, 136, 200)), (4, (37, 192, 256)), (16, (3, 256, 136)))


def main(name: str) -> int:
    for vendor, found in triton.backends.backends.items():  # vLLM has no kernels where it sees no GPU
        found.driver.is_active = staticmethod(lambda vendor=vendor: vendor == "nvidia")
    backend = registry.get(LibraryBackend, name)
    for groups, (m, n, k) in SIZES:
        problem = FAMILY.problem(
            Problem(
                m, n, k, *matrices("fp8e4m3fn", c="bf16", layout="TN"), groups=Groups(groups) if groups > 1 else None
            ),
            "block_rows",
        )
        template = "grouped_tile" if groups > 1 else "tile"
        configs = [Config(template, 16, 64, 128, 1, num_warps=4, num_stages=3, backend=name)]
        if groups == 1:
            configs.append(Config(template, 32, 128, 64, 2, num_warps=4, num_stages=2, backend=name))
        for config in configs:
            try:
                print(f"{problem.key} {config.short_name}: {_result(backend, problem, config)}")
            except UnavailableError as error:
                print(error)
                return 1
    return 0


def _result(backend: LibraryBackend, problem: Problem, config: Config) -> str:
    operands = FAMILY.make_inputs(problem, "cpu")
    exact = FAMILY.reference(problem, operands)
    operands["c"] = exact.new_full(exact.shape, float("nan")).bfloat16()
    call = backend.operation(problem, operands, config)
    if call is None:
        return "refused"
    operands["c"].fill_(float("nan"))
    call()
    error = deviation(operands["c"], exact)
    return "right" if error < FAMILY.tolerance(problem) else f"wrong by {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
