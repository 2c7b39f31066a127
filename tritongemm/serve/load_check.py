"""A loaded kernel, run on random operands → why it is not to be trusted here, or nothing."""

from __future__ import annotations

from functools import partial

import torch

from tritongemm.core import settings
from tritongemm.core.errors import TritonGemmError
from tritongemm.numerics import verify
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Family
from tritongemm.runtime.patched_launch import ServingDevice, TunedLoadedKernel
from tritongemm.serve.fast_call import FastCall

SLACK = 1.1  # of the error that a record was accepted with, where --errRatio let it be beyond the tolerance


def complaint(kernel: TunedLoadedKernel, place: ServingDevice) -> str | None:
    """What is wrong with a kernel, with the tools that are here; None where nothing is.

    Args:
        kernel: loaded, with its record.
        place: the device that it is loaded on.
    """
    record, tools = kernel.record, f"Triton {settings.version('triton')}, torch {settings.version('torch')}"
    problem = record.problem
    family = plugins.get(Family, problem.family)
    try:
        operands = family.make_inputs(problem, str(place.place))
        c = torch.empty((problem.m, problem.n), dtype=getattr(torch, problem.c.torch), device=place.place)
        call = FastCall(kernel, place, c.shape, c.dtype)
        a, b, bias = (operands[name].data_ptr() if name in operands else 0 for name in ("a", "b", "bias"))
        run = partial(call.start, a, b, c.data_ptr(), bias)
        found = verify.verify(problem, family, run, c, family.reference(problem, operands))
    except (TritonGemmError, torch.cuda.OutOfMemoryError) as error:
        return f"could not be checked with {tools}: {error}"
    accepted = max(found.tolerance, SLACK * (record.error or 0.0))
    return None if found.error <= accepted else f"wrong with {tools}: {found.reason}"
