"""What measuring asks of backends."""

from __future__ import annotations

from typing import Any

from tritongemm.codegen import template_facts
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins import _modules


def launch(artifact: Artifact, problem: Problem, target: Target) -> Launch | HostLaunch | None:
    """The launch of a compiled config; None where a library launches its algorithm itself."""
    made: Launch | HostLaunch | None = _modules.load("backends", artifact.config.backend).launch(
        artifact, problem, target
    )
    return made


def available(backend: str) -> Support:
    """Whether a backend can be used on this machine."""
    return Support(_modules.unavailable("backends", backend) or "")


def library(backend: str) -> Any:
    """The backend of a library."""
    return _modules.load("backends", backend)


def is_searched(backend: str) -> bool:
    """Whether a backend's kernels come from templates, so that generated modules hold them."""
    return backend == "triton"


def interpreted(config: Config) -> Support:
    """Whether an interpreter on the CPU can run a config's kernel."""
    if not is_searched(config.backend):
        return Support(f"only a GPU can check a kernel of {config.backend}: the interpreter runs Triton's")
    if not template_facts.kernel_template(config.template).interpreted:
        return Support(f"only a GPU can check a kernel of {config.template}: Triton's interpreter does not run it")
    return SUPPORTED
