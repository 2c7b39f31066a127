"""Inductor: torch.compile of the linear layer, which races its Triton templates against the library."""

from __future__ import annotations

import io
import logging
import time
from contextlib import redirect_stderr
from functools import partial

from competitors import Ready, Setting

NOTE = 'torch.compile(F.linear, mode="max-autotune-no-cudagraphs", dynamic=False)'


def prepare(setting: Setting) -> Ready:
    """Compile a linear layer with Inductor."""
    import torch
    from torch.nn import functional

    torch._logging.set_logs(inductor=logging.CRITICAL)  # a choice that does not fit is no error
    torch._dynamo.reset()  # else sizes after the eighth are not compiled any more

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, w)

    compiled = torch.compile(linear, mode="max-autotune-no-cudagraphs", dynamic=False)
    operands = [(s["a"], s["b"].T) for s in setting.bench.sets]
    said = io.StringIO()
    started = time.perf_counter()
    with redirect_stderr(said):  # its table of choices
        compiled(*operands[0])
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return Ready([partial(compiled, x, w) for x, w in operands], seconds, {"choices": _choices(said.getvalue())})


def _choices(said: str) -> list[str]:
    """The first lines of Inductor's own ranking."""
    return [line.strip() for line in said.splitlines() if " ms " in line][:3]
