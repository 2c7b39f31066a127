"""Whether a config's kernel can compute a problem on a target, by its numbers alone: asked before it is compiled.

A config may come from anywhere: our search, a results file, a journal, another tuner's file, a command line.
"""

from __future__ import annotations

from functools import lru_cache

from tritongemm.codegen import geometry as geometry_module
from tritongemm.codegen import template_facts
from tritongemm.core.config import AXES, Config
from tritongemm.core.launch import shape_fault
from tritongemm.core.problem import Problem
from tritongemm.core.space import TemplateSpace
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.search import space as search_space

LARGEST_INDEX = 2**31 - 1  # kernels count rows, columns and tiles in 32 bits
TILE_ELEMENTS_LIMIT = 2**20  # of one operand's block, which is Triton's own limit
STAGES_LIMIT = 16  # deeper pipelines only keep a compiler busy
COMPILER_OPTION_LIMIT = 8  # of an option that the compiler takes, where no search space lists more


@lru_cache(maxsize=64)
def usable_templates(problem: Problem, target: Target) -> tuple[TemplateSpace, ...]:
    """The templates that can compute a problem on a target, fast or not, with the axes of their search spaces."""
    return search_space.space(problem, target, any_rows=True).axes


def check_problem(problem: Problem, target: Target) -> Support:
    """Whether any config can compute a problem."""
    templates = usable_templates(problem, target)
    if not templates:
        return Support(f"no kernel template that {target.name} runs has such operands")
    for axis, size in (("block_m", problem.m), ("block_n", problem.n), ("block_k", problem.k)):
        least = min(min(dict(t.values)[axis]) for t in templates)
        if size + least - 1 > LARGEST_INDEX:
            return Support(f"a size of {size} in blocks of {least} is beyond the 32 bits in which kernels count")
    return SUPPORTED


def check_config(config: Config, problem: Problem, target: Target) -> Support:
    """Whether a config can compute a problem.

    Raises:
        InputError: no template has its name.
    """
    template_facts.kernel_template(config.template)
    templates = {t.template: t for t in usable_templates(problem, target)}
    if config.template not in templates:
        only = ", ".join(templates)
        return Support(f"{target.name} does not run template {config.template} on such operands; only {only}")
    options = {name for t in templates.values() for name, _ in t.values[len(AXES) :]}
    return Support(
        template_facts.fault(config, options)
        or _option_fault(config, templates[config.template])
        or _count_fault(config, problem)
        or geometry_module.unmet_need(config, problem, target.compute_units)
        or _launch_fault(config, problem, target)
        or ""
    )


def _option_fault(config: Config, listed: TemplateSpace) -> str | None:
    """An option beyond what the search space lists, its default, and what a compiler may be told besides."""
    template, lists = template_facts.kernel_template(config.template), dict(listed.values)
    for name, value in config.options:
        own = name in template.constexprs
        usual = (*lists.get(name, ()), template.defaults.get(name, 0))
        low, high = min(usual), max(*usual, 1 if own else COMPILER_OPTION_LIMIT)
        if not low <= value <= high:
            return f"{name} must be {low} to {high}, not {value}"
    return None


def _count_fault(config: Config, problem: Problem) -> str | None:
    """Numbers without sense, or beyond the 32 bits in which kernels count."""
    if config.num_stages > STAGES_LIMIT:
        return f"num_stages must be at most {STAGES_LIMIT}, not {config.num_stages}"
    blocks = -(-problem.k // config.block_k)
    if config.split_k > blocks:
        return f"split_k must be at most the {blocks} blocks along K, not {config.split_k}"
    m, n, k = config.tile
    largest = max(m * n, m * k, k * n)
    if largest > TILE_ELEMENTS_LIMIT:
        return f"a block of {largest} elements is beyond the compiler's {TILE_ELEMENTS_LIMIT}"
    reached = max(problem.m + m, problem.n + n, problem.k + k * config.split_k) - 1
    grouped = config.group_m * -(-problem.n // n)  # tiles of a group
    if max(reached, grouped) > LARGEST_INDEX:
        return f"{max(reached, grouped)} is beyond the 32 bits in which kernels count (group_m {config.group_m})"
    return None


def _launch_fault(config: Config, problem: Problem, target: Target) -> str | None:
    """A launch that the device can't start, or that has no memory for its partial sums."""
    geometry = geometry_module.geometry(config, problem, target.compute_units)
    if fault := shape_fault(geometry.grid, (config.num_warps * target.wave_size, 1, 1), target):
        return fault
    used = problem.bytes + geometry.workspace_bytes + geometry.semaphore_bytes
    if used > target.memory_bytes:
        return f"its operands and partial sums take {used} bytes, {target.name} has {target.memory_bytes}"
    return None
