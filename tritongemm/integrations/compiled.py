"""Products in code that Inductor wrote: it calls PyTorch's functions by name, and tuned kernels stand before them.

Nothing is traced otherwise than without us. So graphs, their fusions and a server's cache of them stay the server's
own, and a call without a row costs one look into a table instead of an operation of Python.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor

from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import WrittenCalls

_SERVES = "tritongemm_serves"  # attribute of a function that stands before PyTorch's: the dispatcher


def serve_compiled_code() -> None:
    """Serve the products of compiled code in this process, from now on; a second call does nothing."""
    import torch._inductor.kernel.mm  # noqa: F401 (which gives Inductor its names of PyTorch's functions)
    from torch._inductor.select_algorithm import extern_kernels

    if getattr(extern_kernels.mm, _SERVES, None) is default_dispatcher():
        return
    calls = WrittenCalls(default_dispatcher(), torch_linear)
    mm, addmm = extern_kernels.mm, extern_kernels.addmm

    @wraps(mm)
    def serve_mm(a: Tensor, b: Tensor, *more: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        if out is None or more or named or not calls.write(a, b, None, out):
            return mm(a, b, *more, out=out, **named)
        return out

    @wraps(addmm)
    def serve_addmm(
        bias: Tensor, a: Tensor, b: Tensor, *, alpha: Any = 1, beta: Any = 1, out: Tensor | None = None
    ) -> Tensor:
        if out is not None and alpha == 1 and beta == 1:
            row = bias.select(0, 0) if bias.dim() == 2 and bias.stride(0) == 0 else bias
            if row.dim() == 1 and calls.write(a, b, row, out):
                return out
        return addmm(bias, a, b, alpha=alpha, beta=beta, out=out)

    setattr(serve_mm, _SERVES, default_dispatcher())
    extern_kernels.mm, extern_kernels.addmm = serve_mm, serve_addmm
