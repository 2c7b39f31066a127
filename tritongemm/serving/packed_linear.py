"""What compressed-tensors has in a plain layer whose weight is packed, from its version 0.15 on.

That is a forward of its own and a scheme, by which it finds the layers that it decompresses at the model's first call.
"""

from importlib import import_module
from types import FunctionType, MethodType
from typing import Any, Final

from torch import nn

_TAKEN: Final = "w4_taken"


def is_of_compressed_tensors(forward: object) -> bool:
    """Return whether compressed-tensors gave a layer this forward."""
    function = forward.__func__ if isinstance(forward, MethodType) else None
    home = function.__globals__.get("__name__") if isinstance(function, FunctionType) else ""
    return str(home).startswith("compressed_tensors.")


def is_taken(module: nn.Module) -> bool:
    """Return whether `take` keeps something of a layer."""
    return _TAKEN in vars(module)


def take(module: nn.Module) -> None:
    """Keep aside what compressed-tensors has in a layer, so that it stays packed."""
    if is_of_compressed_tensors(vars(module).get("forward")):
        names = [name for name in ("forward", "quantization_scheme") if name in vars(module)]
        module.__dict__[_TAKEN] = {name: module.__dict__.pop(name) for name in names}


def give_back(module: nn.Module) -> None:
    """Give a layer what `take` kept, and have compressed-tensors decompress it when it is called."""
    taken = module.__dict__.pop(_TAKEN, None)
    if taken is None:
        return
    vars(module).update(taken)

    def decompress(called: nn.Module, _: Any) -> None:
        hook.remove()
        if "weight_packed" in called._parameters:
            import_module("compressed_tensors.compressors").decompress_module(called)

    hook = module.register_forward_pre_hook(decompress)
