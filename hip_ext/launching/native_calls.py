"""Serves calls from compiled code, where this machine has a C compiler; elsewhere Python serves them all.

The code is `native_calls.c`, which Triton compiles and caches as it does its own launchers.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tritongemm.core.served_call import PatchedLaunch
from tritongemm.core.support import Support
from tritongemm.hip_ext.driver import symbols
from tritongemm.system import settings


def serve(find: Callable[..., Any], table: dict[bytes, Any], *operands: Any) -> Any:
    """Return the result of a call, or None where Python has to serve it, as it does all until the code is loaded.

    `find` returns what serves a call that the table lacks: a compiled call, another callable, or None.
    """
    return None


@functools.cache
def load() -> Any:
    """Return the compiled module, or as a `Support` why this process has none."""
    if not settings.native():
        return Support("TRITONGEMM_NATIVE is 0")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Support("this Python has no GIL, which the compiled code relies on")
    import torch  # a launch alone does without

    has_gpus = torch.backends.cuda.is_built()
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return Support(f"PyTorch {torch.__version__} has no C functions of DLPack")
    try:
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
        module = compile_module_from_src(source, "native_calls")
        functions = (
            torch.is_grad_enabled,
            torch._C._len_torch_dispatch_stack,
            torch._C._is_any_autocast_enabled,
            torch._C._get_tracing_state,
            torch.autograd.forward_ad,
            torch._C._cuda_isCurrentStreamCapturing if has_gpus else bool,
            torch._C._cuda_getDevice if has_gpus else int,
            torch._C._get_fp32_precision_getter,
        )
        module.configure(capsule, torch.Tensor, torch.nn.Parameter, torch.dtype, functions)
        _use_directly(module)
    except Exception as error:  # whatever a compiler or another PyTorch may do, Python serves the calls
        return Support(f"its code can't be compiled or loaded: {type(error).__name__}: {error}")
    globals()["serve"] = module.serve
    return module


# PyTorch's functions that say in nanoseconds, and not in a tenth of a microsecond each, what is enabled
_DIRECT = (
    "aoti_torch_grad_mode_is_enabled",
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
    "_ZN5torch3jit6tracer15getTracingStateEv",
)


def _use_directly(module: Any) -> None:
    """Ask functions of PyTorch's libraries directly, where these have them and they answer as Python's do."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    said, autocast, grad = [], torch.is_autocast_enabled("cuda"), torch.is_grad_enabled()
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        module.use_directly(*(symbols.address_of(getattr(library, name)) for name in _DIRECT))
        for enabled in (False, True):
            torch.set_grad_enabled(enabled)
            torch.set_autocast_enabled("cuda", enabled)
            said.append(module.sees())
        torch.set_autocast_enabled("cuda", False)
        with TorchDispatchMode():
            said.append(module.sees())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(lambda x: (said.append(module.sees()), x + 1)[1], torch.zeros(1), check_trace=False)  # type: ignore[func-returns-value]
    except Exception:  # another PyTorch; it is asked through Python
        said = []
    finally:
        torch.set_autocast_enabled("cuda", autocast)
        torch.set_grad_enabled(grad)
    if said != [(False, False), (True, True), (True, True), (True, True)]:
        module.use_directly()


def prepare(launch: PatchedLaunch, names: Sequence[str]) -> Any:
    """Return a launch as the compiled module makes it, at addresses in the order of these names; None if it can't."""
    module = load()
    if isinstance(module, Support) or launch.steps is None:
        return None
    steps, places = launch.steps.steps, {name: index for index, name in enumerate(names)}
    slots = tuple(
        (places[name], step, offset, distance % (1 << 64))
        for name, found in launch.steps.slots.items()
        if name in places
        for step, offset, distance in found
    )
    try:
        return module.Launch(steps[0].refuse, launch, tuple(step.described() for step in steps), slots)
    except ValueError:  # larger than it takes
        return None


def compiled_form(ready: Any, *given: Any) -> Any:
    """Return what compiled code calls for operands that a ready call serves; None while that may change."""
    make = getattr(ready, "compiled", None)
    return ready if make is None else make(*given)
