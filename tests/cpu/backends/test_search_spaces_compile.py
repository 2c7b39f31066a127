"""Triton's front end accepts the kernel of every config that a search may try: one that it refuses is a fault of ours.

The steps behind the front end take a hundred times longer, and find other faults: they are left out.
"""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice, product
from typing import Any

import pytest

from tests.support import raising
from tests.support.covering import covering
from tests.support.nouns import Config, Family, InputError, KernelBackend, Patch, Problem, Target, load_target, registry
from tests.support.tables import apart, heavy
from tritongemm.backends.triton import compiling
from tritongemm.codegen import geometry
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.formats import Defaults, make_problem
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

TRITON = registry.get(KernelBackend, "triton")
FAMILIES = [name for family in registry.every(Family) for name in (family.name, *family.variants)]
LAYOUTS = ("TN", "TT", "NN", "NT")
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "batched": {"batch": 3},
    "contiguous": {"groups": 4},
    "masked": {"groups": 4, "group_form": "masked", "room": 1024},
}
SIZES = ((1, 512, 4096), (165, 219, 522), (1024, 1024, 4096))
EPILOGUES = ("none", "silu_mul", "gelu", "gelu_tanh_mul_block", "add")
MOST_SPLITS = 3  # more are more of the same
MOST = 6  # configs of a template that are tried for a problem: all would take a quarter of an hour of two cores
PARTS = 6  # into which the problems of a target are divided
SAMPLE = 8000  # problems among which those are chosen that cover all pairs of their properties


class FrontEndPassed(Exception):
    """The front end has made what the first step after it would take."""


@pytest.fixture(autouse=True)
def front_end_alone(monkeypatch: Patch) -> None:
    """Triton's compiler ends where its front end is done."""

    def change(stages: dict[str, Any]) -> None:
        stages |= dict.fromkeys(stages, raising(FrontEndPassed))

    monkeypatch.setattr(compiling, "_watch", lambda *_: change)


def refusal(config: Config, problem: Problem, target: Target) -> str:
    try:
        return TRITON.compile(TRITON.compile_job(config, problem, target))[0].reason
    except FrontEndPassed:
        return ""


@cache
def problems(target: Target) -> list[Problem]:
    """Of all that the families and the search space compute on a target, such as have every two properties together."""
    dtypes = [d for d in DTYPES if "fnuz" not in d or target.fp8 == "fnuz"]
    named = product(FAMILIES, dtypes, ("", *GRANULARITIES))
    forms = [form for form in named if problem_of(target, *form, "TN", "none", "one", SIZES[-1])]
    rows = [(*form, *rest) for form in forms for rest in product(LAYOUTS, ("none", "n", "m"), KINDS, SIZES, EPILOGUES)]
    possible = (row for row in random.Random(0).sample(rows, len(rows)) if problem_of(target, *row))
    chosen = covering(list(islice(possible, SAMPLE)))
    assert {row[:2] for row in chosen} == {form[:2] for form in forms}
    return [found for row in chosen if (found := problem_of(target, *row))]


def problem_of(
    target: Target, family: str, dtype: str, scales: str, layout: str, bias: str, kind: str,
    size: tuple[int, int, int], epilogue: str = "none",
) -> Problem | None:  # fmt: skip
    rows_a, rows_b = (side == "T" for side in layout)
    given = {"row_major_a": rows_a, "row_major_b": rows_b, "bias": bias, "scales": scales, **KINDS[kind]}
    given |= {"epilogue": epilogue}
    try:
        found = make_problem(Defaults.of(dtype, dtype, family=family), *size, given)
    except InputError:
        return None
    known = registry.get(Family, found.family).supports(found, target) and TRITON.supports(found, target)
    return found if known else None


def configs(problem: Problem, target: Target, most: int) -> Iterator[Config]:
    """Of the configs that pruning leaves, for each template such as have every two values of their axes together.

    The first of them have most of those; there are at most this many of each template.
    """
    by_template: dict[str, dict[tuple[Any, ...], Config]] = {}
    for config in prune.prune(space(problem, target), problem, target).kept:
        constants = geometry.constants(config, problem) | {"CONFIG": "", "SPLIT_K": min(config.split_k, MOST_SPLITS)}
        by_template.setdefault(config.template, {}).setdefault((*constants.values(), config.num_warps), config)
    for found in by_template.values():
        yield from (found[row] for row in covering(list(found))[:most])


def refusals(problems: Iterable[Problem], target: Target, most: int) -> dict[str, str]:
    """One config and its problem for each reason of a refusal; of each template's configs, at most the first."""
    found: dict[str, str] = {}
    for problem in problems:
        chosen = list(configs(problem, target, most))
        assert chosen, problem.key
        for config in chosen:
            if reason := refusal(config, problem, target):
                found.setdefault(reason, f"{config.name} of {problem.key}")
    return found


@apart(
    (
        "gfx942",
        "a8w8",
        {"dtype_a": "int8", "bias": "m", "epilogue": "silu_mul"},
        5,
    ),  # the fifth is a split tile of over 8192 elements
    heavy("gfx950", "a4w4_blockscale", {"groups": 4}, 4),
    heavy("sm90", "a8w8_blockscale", {"scales": "group"}, 3),
)
def test_the_front_end_accepts_each_template(target: str, family: str, given: dict[str, Any], most: int, /) -> None:
    facts = load_target(target)
    defaults = Defaults.of(layout="TN", family=family, fp8_encoding=facts.fp8)
    assert refusals([make_problem(defaults, 1024, 1024, 4096, given)], facts, most) == {}


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1201", "gfx1250", "sm90", "sm100", "sm120"])
def test_the_front_end_accepts_what_is_searched(target: str, part: int) -> None:
    facts = load_target(target)
    assert refusals(problems(facts)[part::PARTS], facts, MOST) == {}
