"""A check whether a library accepts a call, made by calling it."""

from tritongemm.core.operands import Call


def accepts(call: Call) -> bool:
    """Say whether a library that PyTorch calls accepts a product, which also compiles its kernel where needed.

    A device that is out of memory, or lost, raises a RuntimeError.
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
