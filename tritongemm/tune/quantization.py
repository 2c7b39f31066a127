"""The stage that adds the time of quantising A to the race's result of a product with quantised activations."""

from dataclasses import replace

from tritongemm.build import helpers, quantization_kernels
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.quantization_kernels import Quantization, choose_kernels
from tritongemm.core.artifact import CompileJob
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import Evaluator
from tritongemm.system import settings

FROM = "bf16"  # the type of the activations that are quantised


def with_quantization(result: RaceResult, problem: Problem, evaluator: Evaluator) -> RaceResult:
    """Return a race's result with the seconds of quantising A, if A has an 8-bit type or powers of two along K.

    A failure of that measurement does not affect the race.
    """
    asked = _measured(problem, evaluator)
    if asked is None or not result.samples:
        return result
    try:
        launches = _launches(asked, evaluator.target)
        return replace(result, quantize_seconds=evaluator.time_quantization(problem, launches))
    except (TritonGemmError, OSError):
        return result


def quantization_of(problem: Problem) -> Quantization | None:
    """Return the arguments of `tritongemm.quantize` for the A of a problem; None if it has no kernel for it."""
    return quantization_kernels.quantization_of(problem, FROM, problem.m) if problem.kind == "one" else None


def compile_jobs(problem: Problem, evaluator: Evaluator) -> list[CompileJob]:
    """Return the compile jobs of the kernels that quantise A for a problem; none where their time is not measured.

    A run compiles them with its other kernels, for `with_quantization` holds the device while it compiles one.
    """
    asked = _measured(problem, evaluator)
    try:
        return [helpers.helper_job(helper, evaluator.target) for helper, _ in choose_kernels(asked)] if asked else []
    except (TritonGemmError, OSError):
        return []


def _measured(problem: Problem, evaluator: Evaluator) -> Quantization | None:
    """Return the quantisation of A that is measured beside a problem; None where the target or the timer can't."""
    converts = evaluator.target.supports(problem.a.type) or not problem.a.type.is_fp8
    return quantization_of(problem) if converts and evaluator.times_quantization else None


def _launches(asked: Quantization, target: Target) -> tuple[Launch, ...]:
    cache = ArtifactCache(settings.cache_folder())
    return tuple(
        helpers.launch_helper(helpers.compile_helper(helper, target, cache), helper, arguments, target)
        for helper, arguments in choose_kernels(asked)
    )
