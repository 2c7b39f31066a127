"""Checks what public calls get before anything is launched: kinds, devices and encodings of operands, and CPU values.

A check raises an InputError that names the operand, what it is and what it may be; of what is no tensor a TypeError.
None of a call waits for a GPU: values there are looked at by `check_scales` alone, where a program asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES, E8M0_NAN
from tritongemm.core.errors import InputError
from tritongemm.operations.factors import EXPONENTS
from tritongemm.operations.torch_products import DTYPE_NAMES

if TYPE_CHECKING:
    from tritongemm.core.target import Target

is_mapped: Final = torch._C._functorch.is_batchedtensor  # by torch.func.vmap
is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor  # by it or another transform: it has no address
KINDS: Final = {torch.dtype: "a dtype such as torch.bfloat16", str: "a string", bool: "True or False"}
HALVES = (torch.bfloat16, torch.float16)  # also types of factors of int4
SCALED_RESULTS = (*HALVES, torch.float32)
PLAIN_TYPES: Final = frozenset((Tensor, torch.nn.Parameter))
_modes: Final = torch._C._len_torch_dispatch_stack
_tracing: Final = torch._C._get_tracing_state
_grad: Final = torch.is_grad_enabled
_forward: Final = torch.autograd.forward_ad  # a dual number is a plain tensor to all else


def check_scales(**scales: Tensor) -> None:
    """Refuse scale factors that are NaN or infinite, on any device; a GPU is waited for.

    Args:
        scales: factors by their names: float32, or powers of two (e8m0).

    Raises:
        TypeError: one is no tensor.
        InputError: one holds NaN or infinity, or is of another type; names it.

    Examples:
        >>> tritongemm.check_scales(scale_a=torch.ones(4))
        >>> tritongemm.check_scales(scale_a=torch.full([4], float("nan")))
        Traceback (most recent call last):
        tritongemm.core.errors.InputError: scale_a holds NaN or infinity
    """
    check_tensors(scales, together=False)
    for name, factors in scales.items():
        if factors.dtype != torch.float32 and factors.dtype not in EXPONENTS:
            raise InputError(f"{name} is {factors.dtype}; scale factors are float32, or e8m0")
        if factors.is_meta:
            raise InputError(f"{name} is on meta, where there are no values to look at")
        if not _are_numbers(factors):
            raise InputError(f"{name} holds NaN or infinity")


def check_values(**scales: Tensor) -> None:
    """Check factors on a CPU as `check_scales` does; those on a GPU are skipped, as it would have to be waited for."""
    for name, factors in scales.items():
        plain = type(factors) in PLAIN_TYPES and factors.is_cpu and not is_mapped(factors)
        known = factors.dtype in (torch.float32, *HALVES) or factors.dtype in EXPONENTS  # a wrong type is named later
        dense = factors.layout == torch.strided and not factors.is_nested
        if plain and known and dense and not _are_numbers(factors):
            raise InputError(f"{name} holds NaN or infinity")


def wants_gradient(*operands: Tensor | None) -> bool:
    """Return whether a gradient is to flow back to one of these operands."""
    return _grad() and any(tensor is not None and tensor.requires_grad for tensor in operands)


def is_watched() -> bool:
    """Return whether a mode, a tracer or a transform must see calls."""
    return _modes() > 0 or _tracing() is not None or _forward._current_level >= 0


def wants_more(*operands: Tensor | None) -> bool:
    """Return whether a call must do more than compute a product of plain tensors: subclasses, gradients, watchers."""
    grad = _grad()
    for one in operands:
        if one is not None and (type(one) not in PLAIN_TYPES or (grad and one.requires_grad)):
            return True
    return is_watched()


def read_integers(numbers: Tensor) -> list[int]:
    """Return the values of a vector of integers, for which a GPU is waited, out of any wrapper but that of ``vmap``."""
    while is_wrapped(numbers):
        if torch._is_functional_tensor(numbers):
            torch._sync(numbers)  # what was written to it may not be there yet
        numbers = torch._C._functorch.get_unwrapped(numbers)
    values: list[int] = numbers.tolist()
    return values


def check_unmapped(call: str, operands: Mapping[str, Tensor]) -> None:
    """Refuse operands that ``torch.func.vmap`` maps over, for a call whose steps it can't follow."""
    for name, tensor in operands.items():
        if is_mapped(tensor):
            raise InputError(
                f"{name} is mapped by torch.func.vmap, which {call} does not serve; call it for each sample"
            )


def check_bias(bias: Tensor | None) -> None:
    """Refuse a bias of so few bits that PyTorch adds it to nothing, or whose imaginary part would be lost."""
    if bias is not None and (bias.element_size() == 1 or bias.is_complex()):
        raise InputError(f"bias is {bias.dtype}; it may be {', '.join(map(str, SCALED_RESULTS))}")


def _are_numbers(factors: Tensor) -> bool:
    if factors.dtype in EXPONENTS:
        return not bool((factors.contiguous().view(torch.uint8) == E8M0_NAN).any())
    return bool(torch.isfinite(factors).all())


def require_tensors(operands: Mapping[str, object]) -> None:
    """Refuse what is no tensor, nor stands for one as a tracer's proxies do, as ``torch.nn.functional.linear`` does."""
    for name, value in operands.items():
        if not torch.overrides.is_tensor_like(value):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse an argument that is neither None nor of a kind: a dtype, a string, or True or False."""
    if value is not None and not isinstance(value, kind):
        shown = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise InputError(f"{name} is {shown}; give {KINDS[kind]}")


def check_tensors(operands: Mapping[str, object], together: bool = True) -> None:
    """Refuse operands that are no dense tensors or, where they belong together, not on the device of the first."""
    first, device = "", None
    for name, tensor in operands.items():
        if type(tensor) not in PLAIN_TYPES:
            require_tensors({name: tensor})
        assert isinstance(tensor, Tensor)
        check_layout(name, tensor)
        if device is None:
            first, device = name, tensor.device
        elif together and tensor.device != device:
            raise InputError(f"{name} is on {tensor.device}, {first} on {device}; move it there")


def check_layout(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not one block of numbers with strides."""
    if tensor.layout != torch.strided:
        raise InputError(f"{name} is {tensor.layout}; products take strided tensors")
    if tensor.is_nested:
        raise InputError(f"{name} is nested; products take tensors of one shape")


def check_fit(fit: bool, wanted: str, **operands: Tensor) -> None:
    """Refuse operands whose shapes do not belong together."""
    if not fit:
        shapes = " and ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in operands.items())
        raise InputError(f"{shapes} must be {wanted}")


def check_memory(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *operands: Tensor | None) -> None:
    """Refuse memory for a result that is none for it."""
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise InputError(f"out is {out.dtype} {tuple(out.shape)}; the result is {dtype} {shape}")
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        raise InputError(f"out has strides {out.stride()}: several numbers would share one place")
    if wants_gradient(*operands, out):
        raise InputError("a gradient is wanted, and what is written to out has none; call it under torch.no_grad()")


def check_eight_bits(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> None:
    """Refuse operands with a factor for each row, or for blocks, that no family multiplies."""
    for name, tensor in (("a", a), ("b", b)):
        known = DTYPES.get(DTYPE_NAMES.get(tensor.dtype, ""))
        if known is None or not (known.is_fp8 or known.name == "int8"):
            raise InputError(f"{name} is {tensor.dtype}; scaled products take fp8 or int8")
    if a.dtype != b.dtype and torch.int8 in (a.dtype, b.dtype):
        raise InputError(f"a is {a.dtype}, b is {b.dtype}: int8 is multiplied by int8")
    if out_dtype not in SCALED_RESULTS:
        raise InputError(f"out_dtype is {out_dtype}; scaled products give {', '.join(map(str, SCALED_RESULTS))}")


def check_encodings(operands: Mapping[str, Tensor], target: Callable[[], Target]) -> None:
    """Refuse an fp8 encoding that is not the target's: kernels would read other numbers.

    With powers of two along K OCP's are read wherever kernels convert them, as wider numbers where necessary.
    """
    names = {name: DTYPE_NAMES.get(operands[name].dtype, "") for name in "ab"}
    for name, dtype in names.items():
        if not dtype or not DTYPES[dtype].is_fp8 or target().fp8 == "none" or target().supports(DTYPES[dtype]):
            continue
        is_ocps = not dtype.endswith("fnuz")
        if is_ocps and "scale_a" in operands and operands["scale_a"].dtype in EXPONENTS and target().has("dot_scaled"):
            continue
        raise InputError(
            f"{name} is {DTYPES[dtype].torch}; the fp8 encoding of {target().name} is {target().fp8}: quantise to that"
        )
