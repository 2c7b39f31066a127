"""The stage that adds the time of quantising A to the race's result of a product with quantised activations."""

from __future__ import annotations

from dataclasses import replace

from tritongemm.build import helpers, quantization_kernels
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.quantization_kernels import Quantization, choose_kernels
from tritongemm.core import settings
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import Evaluator

FROM = "bf16"  # the type of the activations that are quantised


def with_quantization(result: RaceResult, problem: Problem, evaluator: Evaluator) -> RaceResult:
    """Return a race's result with the seconds of quantising A, if A has an 8-bit type or powers of two along K.

    A failure of that measurement does not affect the race.
    """
    asked, converts = quantization_of(problem), evaluator.target.supports(problem.a) or not problem.a.is_fp8
    if asked is None or not converts or not result.samples or not evaluator.times_quantization:
        return result
    try:
        launches = _launches(asked, evaluator.target)
        return replace(result, quantize_seconds=evaluator.time_quantization(problem, launches))
    except (TritonGemmError, OSError):
        return result


def quantization_of(problem: Problem) -> Quantization | None:
    """Return the arguments of `tritongemm.quantize` for the A of a problem; None if it has no kernel for it."""
    return quantization_kernels.quantization_of(problem, FROM, problem.m) if problem.kind == "one" else None


def _launches(asked: Quantization, target: Target) -> tuple[Launch, ...]:
    cache = ArtifactCache(settings.cache_folder())
    return tuple(
        helpers.launch_helper(helpers.compile_helper(helper, target, cache), helper, arguments, target)
        for helper, arguments in choose_kernels(asked)
    )
