"""Starts serving in each process of a server, whichever server it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls
from tritongemm.system import settings

LOG = logging.getLogger("tritongemm")

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_SCHEMA = "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor"


def start_serving() -> str:
    """Read the tables that TRITONGEMM_CONFIG names, without starting the GPU, which this process may never use.

    Kernels are loaded by the first call on a GPU; a line that says what they serve is logged then. A file that can't
    be read is logged as an error, and the server computes as it did without us.

    Returns:
        What distinguishes the tables from others; "" where nothing is to be served.
    """
    try:
        return default_dispatcher().add_configured() if settings.tuned_configs() else ""
    except TritonGemmError as error:
        LOG.error("%s; nothing is served by tuned kernels", error)
        return ""


def serves_weight(w: Tensor) -> bool:
    """Return whether a record of a linear layer has a weight's N and K."""
    return w.dim() == 2 and (w.shape[0], w.shape[1]) in default_dispatcher().layer_weights


def serves_blocks(w: Tensor, scale: Tensor) -> bool:
    """Return whether a record has the N and K of a weight in fp8, whose factors are float32 for 128 x 128 of it."""
    if w.dim() != 2 or (w.shape[0], w.shape[1]) not in default_dispatcher().scaled_weights:
        return False
    blocks = (cdiv(w.shape[0], SCALED_BLOCK), cdiv(w.shape[1], SCALED_BLOCK))
    return w.dtype in _FP8 and scale.dtype == torch.float32 and tuple(scale.shape) == blocks


class OpaqueOperation:
    """The operation ``tritongemm::name``, opaque to torch.compile: M is looked up in its body, when it runs.

    Attributes:
        call: the operation, of x [..., K], w [N, K] and a bias [N] or None. It exists as long as this object.

    Args:
        name: of the operation.
        calls: computes it.
    """

    def __init__(self, name: str, calls: TunedCalls) -> None:
        exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
        self._library = torch.library.Library("tritongemm", "FRAGMENT")
        self._library.define(f"{name}{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag, exact))

        def compute(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
            return calls(x, w, bias).contiguous()

        def infer(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
            return x.new_empty((*x.shape[:-1], w.shape[0]))

        for key in ("CUDA", "CPU"):
            self._library.impl(name, compute, key)
        torch.library.register_fake(f"tritongemm::{name}", infer, lib=self._library)
        self.call: Callable[..., Any] = getattr(torch.ops.tritongemm, name)


def speak_through(server: str) -> None:
    """Send our log lines to a server's logger, as a server may set up no other.

    Args:
        server: the name of its logger.
    """
    LOG.parent = logging.getLogger(server)
    LOG.setLevel(logging.NOTSET)  # Messages have the server's level.
