"""The search space of one problem on one target, as the target's file in search_spaces/ defines it."""

from collections.abc import Mapping
from typing import Any

from tritongemm.codegen import template_facts
from tritongemm.codegen.template_facts import has_four_bit_weight
from tritongemm.core.config import AXES
from tritongemm.core.problem import Problem
from tritongemm.core.space import Space, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.search_spaces import loader as target_files
from tritongemm.search_spaces import schema as space_schema

# bytes at whose multiples rows must start for the copy engine
ROW_ALIGN_BYTES = 16


def can_compute(section: Mapping[str, Any], problem: Problem, target: Target) -> bool:
    """Say whether a template is correct for a problem on a target, by features, operand types and alignment."""
    widths = problem.a.type.width, problem.b.type.width, problem.c.type.width
    row_bytes = {name: lead * width for name, lead, width in zip("abc", problem.leads, widths, strict=True)}
    aligned = all(row_bytes[name] % ROW_ALIGN_BYTES == 0 for name in section.get("aligned", ()))
    if "operands" in section and (problem.a.type != problem.b.type or problem.a.type.name not in section["operands"]):
        return False
    if problem.a.type.name in section.get("along_k", ()) and (not problem.a.row_major or problem.b.row_major):
        return False  # matrix units read these types only along K
    if "results" in section and not problem.in_blocks and problem.c.type.name not in section["results"]:
        return False
    return aligned and all(target.has(f) for f in section["requires"])


def computes(template: str, problem: Problem, target: Target) -> bool:
    """Say whether a generated template computes a problem's kind (product, batch, groups), scales and layout of B."""
    facts = template_facts.kernel_template(template)
    if problem.microscaled:
        layouts = {s.layout for s in (problem.a.scaling, problem.b.scaling) if s is not None}
        if not (facts.microscaled and target.has("dot_scaled") and all(map(template_facts.reads_scales, layouts))):
            return False
    return problem.kind in facts.kinds and template_facts.reads_b(template, problem)


def _promising(section: Mapping[str, Any], problem: Problem) -> bool:
    """Return whether a template is for this number of rows of a problem; for others it is correct, but slow."""
    low, high = section.get("m", (1, problem.m))
    return bool(low <= problem.m <= high)


def space(
    problem: Problem, target: Target, file: str = "", templates: tuple[str, ...] = (), backend: str = ""
) -> Space:
    """Return the space of one problem.

    `templates` are the only ones to take; empty for all that the target can run. `file` is the stem of
    another file of search_spaces/ than the target's own. `backend` names the file's section of
    that backend's templates; "" for our own.

    Raises:
        InputError: the file's section of a template is wrong; says what.
    """
    name = file or target.name
    data = target_files.space_file(name)
    where = f"search_spaces/{name}.yaml: {f'{backend}.' if backend else ''}templates"
    sections = ((data.get(backend) or {}) if backend else data).get("templates", {})
    usable = []
    for template, section in sections.items():
        if templates and template not in templates:
            continue
        space_schema.check_template(f"{where}.{template}", section, AXES)
        if not backend and template in template_facts.names() and not computes(template, problem, target):
            continue
        if backend and {problem.a.type.packed, problem.b.type.packed} != {1} and "operands" not in section:
            continue  # elements that share a byte are for templates that name them
        if can_compute(section, problem, target) and _promising(section, problem):
            other = "microscaled" if problem.microscaled else "four_bits" if has_four_bit_weight(problem) else ""
            axes = section["axes"] | section.get(other, {})
            named = [(a, tuple(axes[a])) for a in AXES]
            named += [(o, tuple(v)) for o, v in section.get("options", {}).items()]
            usable.append(TemplateSpace(template, tuple(named), *([backend] if backend else [])))
    return Space(target, problem, tuple(usable))
