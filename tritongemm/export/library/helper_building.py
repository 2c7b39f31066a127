"""Builds a library's helper kernels, those that its calls need beside the products."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tritongemm.build import expert_kernels, helpers, quantization_kernels
from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.export.library.helper import LibraryHelper
from tritongemm.system import settings

_FLOATS = ("bf16", "fp16", "fp32")
_ROWS = (1, 1024)  # few and many: binaries do not depend on M otherwise


@dataclass
class BuiltHelpers:
    """The outcome of building helper kernels.

    Attributes:
        helpers: of a library, with their code objects.
        left_out: the others, with the reason.
    """

    helpers: list[tuple[LibraryHelper, bytes]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def build_helpers(problems: Sequence[Problem], target: Target, toolchain: Mapping[str, str]) -> BuiltHelpers:
    """Return the helper kernels that calls of some products need, compiled where the cache lacks them.

    Args:
        problems: the products.
        target: what they are compiled for.
        toolchain: versions that compile here.
    """
    wanted = {helper.digest(target.name): (helper, given) for p in problems for helper, given in _wanted(p, target)}
    built = BuiltHelpers()
    if not wanted:
        return built
    cache = ArtifactCache(settings.cache_folder())
    try:
        artifacts = helpers.compile_helpers([helper for helper, _ in wanted.values()], target, cache)
    except TritonGemmError as error:
        built.left_out += [(str(helper), str(error)) for helper, _ in wanted.values()]
        return built
    for (digest, (helper, given)), artifact in zip(wanted.items(), artifacts, strict=True):
        try:
            built.helpers.append(_entry(artifact, helper, given, digest, target, toolchain))
        except (TritonGemmError, OSError) as error:
            built.left_out.append((f"{helper} for {target.name}", str(error)))
    return built


def _entry(
    artifact: Artifact,
    helper: HelperKernel,
    given: HelperArguments,
    digest: str,
    target: Target,
    toolchain: Mapping[str, str],
) -> tuple[LibraryHelper, bytes]:
    launch = helpers.launch_helper(artifact, helper, given, target)
    code = launch.read_code()
    sha256, suffix = hashlib.sha256(code).hexdigest(), Path(launch.path).suffix[1:]
    found = LibraryHelper(
        sha256, suffix, len(code), helper.name, target.name, digest, toolchain, replace(launch, path="")
    )
    return found, code


def _wanted(problem: Problem, target: Target) -> Iterable[tuple[HelperKernel, HelperArguments]]:
    """Yield the kernels that quantise the A of a product, and those between the products of a mixture of experts."""
    types = tuple(dict.fromkeys(("bf16", problem.dtype_c))) if problem.dtype_c in _FLOATS else ("bf16",)
    if target.supports(problem.a) or not problem.a.is_fp8:  # `quantize` refuses others
        for dtype_x in types:
            for m in _ROWS:
                asked = quantization_kernels.quantization_of(problem, dtype_x, m)
                yield from quantization_kernels.choose_kernels(asked) if asked is not None else ()
    if problem.dtype_c in _FLOATS:
        yield from expert_kernels.kernels_for(problem, target)
