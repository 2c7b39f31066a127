"""Products in code that Inductor wrote: it calls PyTorch's functions and a server's operators by name, and tuned
kernels stand before them.

Nothing is traced otherwise than without us. So graphs, their fusions and a server's cache of them stay the server's
own, and a call without a row costs one look into a table instead of an operation of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations.process import attribute, may_change
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving import dispatcher, server_calls
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import WrittenCalls

_SERVES = "tritongemm_serves"  # attribute of a function that stands before PyTorch's: the dispatcher
_modes = torch._C._len_torch_dispatch_stack


class _Before:
    """Stands before an operator's function: a hook sees each call that no tracer does, all arguments by their places.

    What the hook leaves to the operator it is not asked again, by the shape of x and the address of the weight, until
    rows are added: that would cost the host five times as long. A weight in the place of one that is gone is computed
    as that was, which costs its kernel at most.

    Args:
        own: the operator's.
        hook: of a server's function, as `process.make_hook` gives it.
        names: of the operator's arguments.
        places: of x and of the weight among them.
    """

    def __init__(
        self, own: Callable[..., Any], hook: Callable[..., Any], names: list[str], places: tuple[int, int]
    ) -> None:
        self._own, self._hook, self._names = own, hook, names
        self._x, self._weight = places

    def __call__(self, *given: Any, **named: Any) -> Any:
        if named:
            given += tuple(map(named.pop, [*takewhile(named.__contains__, self._names[len(given) :])]))
        if named or _modes():
            return self._own(*given, **named)
        if server_calls.product_or is not server_calls.UNCOUNTED:  # a capture counts every call
            return self._hook(self._own, *given)
        try:
            key = given[self._x].shape, given[self._weight].data_ptr()
        except Exception:  # of another version, which the hook says
            return self._hook(self._own, *given)
        declined = dispatcher.default.calls.declined
        return self._own(*given) if key in declined else self._ask(declined, key, given)

    def _ask(self, declined: dict[Any, None], key: Any, given: tuple[Any, ...]) -> Any:
        calls, last = 0, None

        def own(*changed: Any) -> Any:
            nonlocal calls, last
            calls, last = calls + 1, self._own(*changed)
            return last

        result = self._hook(own, *given)
        # More calls than one were a race, which a tuned kernel may have won.
        if calls == 1 and result is last and not may_change(given[self._x]):
            keep(declined, key, None)
        return result

    def __hash__(self) -> int:  # which PyTorch's tables of operators ask for
        return hash(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def stand_before(name: str, hook: Callable[..., Any], places: tuple[int, int]) -> bool:
    """Put a hook before an operator, once, in Python and in compiled code; return whether PyTorch knows it.

    Args:
        name: ``namespace::operator``.
        hook: as for `_Before`.
        places: the same.
    """
    namespace, _, operator = name.partition("::")
    every = attribute(getattr(torch.ops, namespace), operator)
    for one in () if every is None else (every, every.default):
        if not isinstance(one._op, _Before):
            names = [argument.name for argument in every.default._schema.arguments]
            one._op = _Before(one._op, hook, names, places)
    return every is not None


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
