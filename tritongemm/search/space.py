"""Stage: Target, Problem → Space, the configs one problem may be tried with on one target."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tritongemm.core.config import AXES, BLOCKS, Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics.lookup import extras, shuffled_b
from tritongemm.search_spaces import loader as target_files
from tritongemm.search_spaces import schema as space_schema

ROW_ALIGN = 16  # bytes; the copy engine's requirement


@dataclass(frozen=True)
class TemplateSpace:
    """The axes of one template: a name and its values each, fixed fields first, then options; and whose template."""

    template: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    backend: str = "triton"

    def __len__(self) -> int:
        return prod(len(v) for _, v in self.values)

    def config(self, point: tuple[int, ...]) -> Config:
        fixed: dict[str, Any] = dict(zip(AXES, point, strict=False))
        options = tuple(zip((n for n, _ in self.values[len(AXES) :]), point[len(AXES) :], strict=True))
        return Config(template=self.template, options=options, backend=self.backend, **fixed)

    def as_deep(self, config: Config, other: Config) -> Config:
        """`config` with as many bytes of A and B under way as `other`, or nearly."""
        bytes_of = {c: (c.block_m + c.block_n) * c.block_k for c in (config, other)}
        stages = other.num_stages * bytes_of[other] / bytes_of[config]
        return replace(config, num_stages=min(dict(self.values)["num_stages"], key=lambda n: abs(n - stages)))

    def point(self, config: Config) -> tuple[int, ...]:
        return tuple(
            getattr(config, name) if name in AXES else config.option(name, values[0]) for name, values in self.values
        )


@dataclass(frozen=True)
class Space:
    """All configs of one problem on one target, before pruning."""

    target: Target
    problem: Problem
    axes: tuple[TemplateSpace, ...]

    def __len__(self) -> int:
        return sum(map(len, self.axes))

    def __iter__(self) -> Iterator[Config]:
        for axes in self.axes:
            yield from map(axes.config, itertools.product(*(v for _, v in axes.values)))

    def sample(self, count: int, rng: random.Random) -> list[Config]:
        """`count` configs drawn with replacement, templates by the size of their axes."""
        chosen = rng.choices(self.axes, weights=[len(a) for a in self.axes], k=count)
        return [a.config(tuple(rng.choice(v) for _, v in a.values)) for a in chosen]

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Configs one step away along one axis; from blocks of another size also with as many bytes under way."""
        axes = next(a for a in self.axes if a.template == config.template)
        point = axes.point(config)
        for i, (name, values) in enumerate(axes.values):
            here = values.index(point[i]) if point[i] in values else None
            for j in range(len(values)) if here is None else (here - 1, here + 1):
                if 0 <= j < len(values):
                    near = axes.config((*point[:i], values[j], *point[i + 1 :]))
                    yield near
                    if name in BLOCKS:
                        yield axes.as_deep(near, config)


def _usable(section: dict[str, Any], problem: Problem, target: Target, backend: str) -> bool:
    """Whether the target can run a template and the problem has the sizes and alignment it is for."""
    if shuffled_b(problem) or (backend == "triton" and not all(e.operator for e in extras(problem))):
        return False  # no template reads such a B; Triton's epilogues can't apply such scales
    low, high = section.get("m", (1, problem.m))
    rows = {
        "a": (problem.k if problem.row_major_a else problem.m) * problem.a.bytes,
        "b": (problem.n if problem.row_major_b else problem.k) * problem.b.bytes,
        "c": problem.n * problem.c.bytes,
    }
    aligned = all(rows[name] % ROW_ALIGN == 0 for name in section.get("aligned", ()))
    if "operands" in section and (problem.a != problem.b or problem.a.name not in section["operands"]):
        return False
    if "results" in section and problem.c.name not in section["results"]:
        return False
    return aligned and low <= problem.m <= high and all(target.has(f) for f in section["requires"])


def space(
    problem: Problem, target: Target, file: str = "", templates: tuple[str, ...] = (), backend: str = "triton"
) -> Space:
    """The space of one problem.

    Args:
        problem: what is tuned.
        target: where.
        file: stem of another file of search_spaces/ than the target's own.
        templates: only these; empty for all the target can run.
        backend: whose templates: Triton's, or those in the file's section of the backend's name.

    Raises:
        InputError: the file's section of a template is wrong; says what.
    """
    name = file or target.name
    data = target_files.space_file(name)
    sections = (data if backend == "triton" else data.get(backend) or {}).get("templates", {})
    usable = []
    for template, section in sections.items():
        if templates and template not in templates:
            continue
        space_schema.check_template(f"search_spaces/{name}.yaml: templates.{template}", section, AXES)
        if _usable(section, problem, target, backend):
            named = [(a, tuple(section["axes"][a])) for a in AXES]
            named += [(o, tuple(v)) for o, v in section.get("options", {}).items()]
            usable.append(TemplateSpace(template, tuple(named), backend))
    return Space(target, problem, tuple(usable))
