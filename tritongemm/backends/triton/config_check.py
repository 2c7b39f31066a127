"""Checks, before a config is compiled, whether its kernel can compute a problem on a target, by its numbers alone.

A config may come from anywhere: our search, a results file, a journal, another tuner's file, a command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tritongemm.codegen import geometry as geometry_module
from tritongemm.codegen import template_facts
from tritongemm.codegen.fact_sections import RUNS
from tritongemm.codegen.geometry import LARGEST_INDEX
from tritongemm.core.config import AXES, BLOCKS, Config
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.launch import shape_fault
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.search import space as search_space
from tritongemm.search_spaces import loader as target_files
from tritongemm.search_spaces import schema as space_schema

TILE_ELEMENTS_LIMIT = 2**20  # of one operand's block, which is Triton's own limit
SPLITS_LIMIT = 64  # or the blocks along K, where those are more: further splits are correct, and empty
STAGES_LIMIT = 16  # deeper pipelines only keep a compiler busy
COMPILER_OPTION_LIMIT = 8  # of an option that the compiler takes, where no search space lists more


def check_problem(problem: Problem, target: Target) -> Support:
    """Return whether any config can compute a problem."""
    return _check_problem(problem, target, target_files.SPACES)


@lru_cache(maxsize=4096)  # called for each config of a problem
def _check_problem(problem: Problem, target: Target, folder: Path) -> Support:
    templates = [t for t in _templates(target.name, folder).values() if t.listed_here]
    blocks = [t.blocks for t in templates if t.can_compute(problem, target)]
    if not blocks:
        return Support(f"no kernel template that {target.name} runs has such operands")
    for size, leasts in zip((problem.m, problem.n, problem.k), zip(*blocks, strict=True), strict=True):
        if size + min(leasts) - 1 > LARGEST_INDEX:
            return Support(f"a size of {size} in blocks of {min(leasts)} is beyond the 32 bits in which kernels count")
    return SUPPORTED


def check_config(config: Config, problem: Problem, target: Target) -> Support:
    """Return whether a config can compute a problem. Raises InputError: no template has its name."""
    template_facts.kernel_template(config.template)
    templates = _templates(target.name, target_files.SPACES)
    found = templates.get(config.template)
    if found is None or not found.can_compute(problem, target):
        only = ", ".join(name for name, t in templates.items() if t.can_compute(problem, target))
        return Support(f"{target.name} does not run template {config.template} on such operands; only {only}")
    compiler_options = {name for t in templates.values() if t.listed_here for name in t.options}
    return Support(
        template_facts.fault(config, compiler_options)
        or _option_fault(config, found)
        or _count_fault(config, problem)
        or geometry_module.unmet_need(config, problem, target.compute_units)
        or geometry_module.batch_fault(config, problem)
        or _launch_fault(config, problem, target)
        or ""
    )


@dataclass(frozen=True)
class ListedTemplate:
    """A template's axes and options in the search spaces.

    `sections` are of the files that list it, the asking target's first; `blocks` are the smallest along M, N and K,
    `options` the least and the greatest value of each.
    """

    name: str
    sections: tuple[Mapping[str, Any], ...]
    listed_here: bool
    blocks: tuple[int, int, int]
    options: Mapping[str, tuple[int, int]]

    def can_compute(self, problem: Problem, target: Target) -> bool:
        """Return whether its kernel is correct for a problem on a target, however slow."""
        right = any(search_space.can_compute(section, problem, target) for section in self.sections)
        return right and search_space.computes(self.name, problem, target)


@cache
def _templates(target: str, folder: Path) -> dict[str, ListedTemplate]:
    """Return the templates of all targets' search spaces, as a kernel that one file lists may be correct elsewhere."""
    sections: dict[str, list[Mapping[str, Any]]] = {}
    own = target_files.space_file(target)["templates"]
    for name in [target, *(n for n in target_files.target_names() if n != target)]:
        try:
            listed = target_files.space_file(name)["templates"]
            for template, section in listed.items():
                space_schema.check_template(f"search_spaces/{name}.yaml: templates.{template}", section, AXES)
        except InputError:
            if name == target:
                raise
            continue  # a fault in another target's file is reported when that target is used
        for template, section in listed.items():
            sections.setdefault(template, []).append(section)
    return {t: _listed_template(t, found, t in own) for t, found in sections.items() if t in template_facts.names()}


def _listed_template(name: str, sections: list[Mapping[str, Any]], listed_here: bool) -> ListedTemplate:
    m, n, k = (min(min(s["axes"][axis]) for s in sections) for axis in BLOCKS)
    values: dict[str, list[int]] = {}
    for section in sections:
        for option, listed in section.get("options", {}).items():
            values.setdefault(option, []).extend(listed)
    ranges = {option: (min(listed), max(listed)) for option, listed in values.items()}
    return ListedTemplate(name, tuple(sections), listed_here, (m, n, k), ranges)


def _option_fault(config: Config, listed: ListedTemplate) -> str | None:
    """Return the first option beyond what search spaces list, its default, and the compiler's range."""
    template = template_facts.kernel_template(config.template)
    for name, value in config.options:
        usual = (*listed.options.get(name, ()), template.defaults.get(name, 0))
        usual += (template.order.most_runs,) if name == RUNS else ()
        low, high = min(usual), max(*usual, 1 if name in template.constexprs else COMPILER_OPTION_LIMIT)
        if not low <= value <= high:
            return f"{name} must be {low} to {high}, not {value}"
    return None


def _count_fault(config: Config, problem: Problem) -> str | None:
    """Return which numbers make no sense, or exceed the 32 bits in which kernels count."""
    if config.num_stages > STAGES_LIMIT:
        return f"num_stages must be at most {STAGES_LIMIT}, not {config.num_stages}"
    most = max(SPLITS_LIMIT, cdiv(problem.k, config.block_k))
    if config.split_k > most:
        return f"split_k must be at most {most}, not {config.split_k}"
    m, n, k = config.tile
    largest = max(m * n, m * k, k * n)
    if largest > TILE_ELEMENTS_LIMIT:
        return f"a block of {largest} elements is beyond the compiler's {TILE_ELEMENTS_LIMIT}"
    reached = max(problem.m + m, problem.n + n, problem.k + k * config.split_k) - 1
    grouped = config.group_m * cdiv(problem.n, n)  # tiles per group
    if max(reached, grouped) > LARGEST_INDEX:
        return f"{max(reached, grouped)} is beyond the 32 bits in which kernels count (group_m {config.group_m})"
    return None


def _launch_fault(config: Config, problem: Problem, target: Target) -> str | None:
    """Return why the device can't start a launch, or lacks memory for its partial sums."""
    geometry = geometry_module.geometry(config, problem, target.compute_units)
    if fault := shape_fault(geometry.grid, (config.num_warps * target.wave_size, 1, 1), target):
        return fault
    used = problem.bytes + geometry.workspace_bytes + geometry.semaphore_bytes
    if used > target.memory_bytes:
        return f"its operands and partial sums take {used} bytes, {target.name} has {target.memory_bytes}"
    return None
