"""A loaded kernel is run on random operands before calls rely on it."""

from __future__ import annotations

from functools import partial

import torch

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.record import Record
from tritongemm.core.serving import LoadedKernel
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics import verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.launching import PatchedCall
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.system import settings

# A kernel may deviate by this factor of the error that its record was accepted with, where --errRatio let that be
# beyond the tolerance.
ACCEPTED_ERROR_FACTOR = 1.1


def check_kernel(kernel: LoadedKernel, record: Record, device: ServingDevice) -> Support:
    """Whether a kernel computes its problem with the tools that are installed, or what is wrong with it.

    Args:
        kernel: the loaded kernel.
        record: the result that chose it.
        device: the GPU that it is loaded on.
    """
    tools = f"Triton {settings.version('triton')}, torch {settings.version('torch')}"
    problem = record.problem
    family = registry.get(Family, problem.family)
    try:
        operands = family.make_inputs(problem, str(device.torch_device))
        c = torch.empty(
            problem.operands["c"].extents, dtype=getattr(torch, problem.c.torch), device=device.torch_device
        )
        call = PatchedCall(kernel, device, c.shape, c.dtype)
        run = partial(call.start_on, {name: tensor.data_ptr() for name, tensor in (operands | {"c": c}).items()})
        result = verify.verify(problem, family, run, c, family.reference(problem, operands))
    except (TritonGemmError, torch.cuda.OutOfMemoryError) as error:
        return Support(f"could not be checked with {tools}: {error}")
    accepted = max(result.tolerance, ACCEPTED_ERROR_FACTOR * (record.error or 0.0))
    return SUPPORTED if result.error <= accepted else Support(f"wrong with {tools}: {result.reason}")
