"""Rules about kernels without matrix instructions."""

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import accumulator_registers, has_single_row, register_limit

# Rows of one matrix instruction: a problem of more wastes nothing on matrix units.
MATRIX_ROWS = 16


def vector_rows(config: Config, problem: Problem, target: Target) -> str | None:
    """Without matrix instructions only a few rows are worth it."""
    few = min(problem.m, problem.n)
    return f"{few} rows > {MATRIX_ROWS} for a kernel without matrix instructions" if few > MATRIX_ROWS else None


def gemv_prefetch(config: Config, problem: Problem, target: Target) -> str | None:
    """What goes straight to the registers that multiply is not staged."""
    deep = has_single_row(config) and config.option("prefetch", 1) > 1
    return f"prefetch {config.option('prefetch')} for a single row of A" if deep else None


def vector_registers(config: Config, problem: Problem, target: Target) -> str | None:
    """Products of an entire block stay in registers until the end."""
    held, limit = accumulator_registers(config, target), register_limit(config, target)
    return f"{held} products >= {limit} registers" if held >= limit else None
