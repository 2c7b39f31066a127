"""Compiles and launches helper kernels as the products' are."""

from __future__ import annotations

from tritongemm.backends.triton import compiling
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Launch, Param
from tritongemm.core.target import Target


def compile_job(helper: HelperKernel, target: Target) -> CompileJob:
    """Return the compile job of a helper kernel."""
    overlap = {"OVERLAPS": target.has("launch_overlap")} if helper.overlaps else {}
    identity = compiling.job_identity(
        target,
        source=helper.source,
        constants=dict(helper.constants) | overlap,
        options={"num_warps": helper.num_warps, "num_stages": 1},
        signature=dict(helper.signature),
        divisors={name: divisor for name, divisor in helper.divisors.items() if divisor > 1},
        small=[],
    )
    config = Config(helper.name, 0, 0, 0, num_warps=helper.num_warps, num_stages=1)
    return CompileJob(config, identity, {"vendor": target.vendor})


def make_launch(built: Artifact, helper: HelperKernel, arguments: HelperArguments) -> Launch:
    """Return the launch of a compiled helper kernel; each buffer has the name of its parameter without ``_ptr``."""
    params = [
        Param("pointer", name.removesuffix("_ptr")) if kind.startswith("*") else Param(kind, arguments.numbers[name])
        for name, kind in helper.signature.items()
    ]
    return compiling.make_launch(built, arguments.grid, params)
