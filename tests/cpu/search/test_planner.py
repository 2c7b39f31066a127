"""The planning of a search: which templates it may try."""

from dataclasses import replace
from pathlib import Path

from tests.support.kernel_cases import GFX942, SM90
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.space import SearchLimits
from tritongemm.search.planner import NO_LIMITS, plan_search

LINEAR = Problem(64, 512, 1024, *matrices("bf16", layout="TN"))


def templates(limits: SearchLimits, folder: Path, problem: Problem = LINEAR) -> set[str]:
    target = SM90 if problem == LINEAR else GFX942
    return {config.template for config in plan_search(problem, target, folder, "triton", limits).order.configs}


def test_without_a_gpu_kernels_that_only_one_can_check_are_not_tried(tmp_path: Path) -> None:
    """On Hopper they are predicted to be the fastest, take longest to compile, and none of them could win."""
    every = templates(NO_LIMITS, tmp_path)
    assert {"tile", "tma", "ws_tma", "ws_tma_swapped"} <= every
    assert templates(replace(NO_LIMITS, interpreted=True), tmp_path) == every - {"ws_tma", "ws_tma_swapped"}


def test_where_nothing_else_is_left_they_are_tried(tmp_path: Path) -> None:
    """The reason is reported."""
    assert templates(SearchLimits(templates=("ws_tma",), interpreted=True), tmp_path) == {"ws_tma"}


def test_all_templates_of_amds_targets_can_be_checked(tmp_path: Path) -> None:
    problem = replace(LINEAR, m=65)
    assert templates(replace(NO_LIMITS, interpreted=True), tmp_path, problem) == templates(NO_LIMITS, tmp_path, problem)
