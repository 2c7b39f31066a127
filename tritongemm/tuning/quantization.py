"""Stage: the race of a product of quantised activations → the same with the time in which they are quantised."""

from __future__ import annotations

from dataclasses import replace

from tritongemm.build import helpers
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.quantization_kernels import GROUP, Quantization, choose_kernel
from tritongemm.core import settings
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import Evaluator

FROM = "bf16"  # the type of the activations that are quantised


def with_quantization(result: RaceResult, problem: Problem, evaluator: Evaluator) -> RaceResult:
    """A race's result with the seconds of quantising A, where its factors are of rows or of blocks.

    Whatever goes wrong with that costs the race nothing.
    """
    asked = quantization_of(problem)
    if asked is None or not result.samples or not evaluator.times_quantization:
        return result
    try:
        launch = _launch(asked, evaluator.target)
        return replace(result, quantize_seconds=evaluator.time_quantization(problem, launch))
    except (TritonGemmError, OSError):
        return result


def quantization_of(problem: Problem) -> Quantization | None:
    """What `tritongemm.quantize` does for the A of a problem; None where it has no kernel for that."""
    scaling, is_eight_bits = problem.scale_a, problem.a.is_fp8 or problem.dtype_a == "int8"
    if scaling is None or not is_eight_bits or problem.kind != "one" or not problem.row_major_a:
        return None
    if scaling.dtype != "fp32" or scaling.rows != 1 or scaling.depth not in (0, GROUP):
        return None
    extents = scaling.shape(problem.m, problem.k)
    if scaling.layout not in ("rows", "groups"):
        return None
    strides = (1, extents[1]) if scaling.layout == "groups" else (extents[1], 1)
    granularity = "block" if scaling.depth else "row"
    return Quantization(problem.m, problem.k, FROM, problem.dtype_a, granularity, strides)


def _launch(asked: Quantization, target: Target) -> Launch:
    helper, arguments = choose_kernel(asked)
    artifact = helpers.compile_helper(helper, target, ArtifactCache(settings.cache_folder()))
    return helpers.launch_helper(artifact, helper, arguments, target)
