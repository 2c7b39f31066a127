"""Compiles kernels beside the products, e.g. those that quantise operands, where the cache lacks them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Launch
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, SearchedBackend

_TEXTS = Path(__file__).parents[1] / "codegen" / "templates" / "helpers"


@cache
def read_text(name: str) -> str:
    """Return the module of kernels of a file in templates/helpers, without its suffix."""
    text, begin = ((_TEXTS / f"{one}.j2").read_text(encoding="utf-8") for one in (name, "_begin"))
    return text.replace("{{ begin }}", begin)


@cache
def _compiler() -> SearchedBackend:
    """Return the backend that compiles such kernels."""
    for backend in registry.every(Backend):
        if isinstance(backend, SearchedBackend) and backend.has_helpers:
            if not (available := backend.available()):
                raise UnavailableError(available.reason)
            return backend
    raise UnavailableError("no backend here compiles kernels beside the products")


def compile_helper(helper: HelperKernel, target: Target, cached: ArtifactCache) -> Artifact:
    """Return the compiled kernel.

    An InputError says why it can't be compiled, an UnavailableError that nothing here can.
    """
    (artifact,) = compile_helpers([helper], target, cached)
    _require_compiled(artifact, helper, target)
    return artifact


def helper_job(helper: HelperKernel, target: Target) -> CompileJob:
    """Return the compile job of a kernel; arguments and errors are those of `compile_helper`."""
    return _compiler().helper_job(helper, target)


def compile_helpers(wanted: Sequence[HelperKernel], target: Target, cached: ArtifactCache) -> list[Artifact]:
    """Compile kernels on all cores and return their artifacts; arguments and errors are those of `compile_helper`."""
    from tritongemm.build import pool

    jobs = [helper_job(helper, target) for helper in wanted]
    found = pool.build_missing(jobs, cached)
    return [found[job.digest] for job in jobs]


def launch_helper(artifact: Artifact, helper: HelperKernel, arguments: HelperArguments, target: Target) -> Launch:
    """Return the launch of a compiled kernel; an InputError if it was not compiled, or the target can't start it so."""
    _require_compiled(artifact, helper, target)
    launch = _compiler().helper_launch(artifact, helper, arguments)
    if fault := launch.fault(target):
        raise InputError(f"{helper.name} can't be launched on {target.name}: {fault}")
    return replace(launch, overlap=helper.overlaps and target.has("launch_overlap"))


def _require_compiled(artifact: Artifact, helper: HelperKernel, target: Target) -> None:
    if artifact.status != "ok":
        raise InputError(f"{helper.name} was not compiled for {target.name}: {artifact.status}: {artifact.reason}")
