"""Whether a library accepts a call, found out by making it."""

from __future__ import annotations

from collections.abc import Callable


def accepts(call: Callable[[], object]) -> bool:
    """Whether a library that PyTorch calls computes what is asked for; what it compiles at first it has compiled then.

    Raises:
        RuntimeError: the device is out of memory, or lost.
    """
    import torch

    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise
        return False
    return True
