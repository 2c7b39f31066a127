"""Kernel source: an untuned kernel that adds up in one order at every M, where a program wants invariant rows.

A row of a table serves then if it states the order in which its kernel adds up products, the kernel does so, and its
bits are those that the table has. Where no row holds for an M, an untuned kernel of the product's order serves.
"""

import warnings
from collections.abc import Iterator
from typing import ClassVar

import torch

from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.served_call import INVARIANT, CallSignature, LoadedKernel, Resolution
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics import shared_rows
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import KernelBackend, KernelSource
from tritongemm.plugins.validity import check_order
from tritongemm.serving import stated_orders
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.system import settings

_FEW, _SOME = 16, 64  # rows up to which tiles are as low
_MANY = 4096  # rows of a product whose order is chosen
_UNTUNED = 1e-6  # seconds that a record must have, though nothing was timed


class InvariantKernel(KernelSource):
    """A kernel of ours whose rows do not depend on M, for a size that no invariant row holds for."""

    rank: ClassVar[int] = 24

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return the kernel, compiled and loaded by the first call of a size, or why there is none."""
        if not call.invariant:
            return Support("rows need not be invariant (TRITONGEMM_INVARIANT=1)")
        if call.precision == "fp32" and call.problem.a.dtype == "fp32":
            return Support("PyTorch multiplies float32 in full")
        return _find_kernel(call.problem, device)

    def review(self, answer: Resolution, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return another source's answer, if its rows are invariant, or it is PyTorch as the last resort."""
        record = answer.record
        if not call.invariant or answer.kind in ("fallback", INVARIANT):
            return answer
        if record is None or answer.kernel is None or not record.order:
            return Support("rows must be invariant, and this one states no order of additions")
        return _check(record, answer.kernel, call.problem, device) and answer


def _find_kernel(problem: Problem, device: DeviceKernels) -> Resolution | Support:
    """Return an untuned kernel in the order of a product's rows, or without rows in that of an unsplit K."""
    if torch.cuda.is_current_stream_capturing():
        return Support("an invariant kernel is loaded at the first call of a size, and not while a graph is captured")
    try:
        order = _order_of(problem, device)
        if isinstance(order, Support):
            return order
        record, kernel = _load(problem, order, device)
    except TritonGemmError as error:
        return Support(str(error))
    if isinstance(kernel, Support):
        return kernel
    text = f"{record.config.name} (not tuned; its order of additions, {order}, is that of all M)"
    return Resolution(INVARIANT, text, kernel, record=record)


def _check(record: Record, kernel: LoadedKernel, problem: Problem, device: DeviceKernels) -> Support:
    """Return whether a record's kernel has the order and the bits that it states; its first call compares them."""
    key = record.config.name, problem.at(1)
    if key in device.row_checks:
        return device.row_checks[key]
    if torch.cuda.is_current_stream_capturing():
        return Support("its bits are compared at its first call, and not while a graph is captured")
    order = _order_of(problem, device)
    found = order if isinstance(order, Support) else check_order(record, device.target)
    found = found if isinstance(order, Support) or not found else _check_bits(record, kernel, problem, order, device)
    if not found:
        warnings.warn(f"{problem.key}: its row does not serve: {found}", stacklevel=2)
    device.row_checks[key] = found
    return found


def _check_bits(record: Record, kernel: LoadedKernel, problem: Problem, order: str, device: DeviceKernels) -> Support:
    """Return whether the kernel's rows have the table's bits, or those of a kernel of ours with the same order.

    Another version of PyTorch may make other random operands, which change the bits of all kernels alike.
    """
    if not shared_rows.supports(problem):
        return SUPPORTED
    bits = device.row_bits(kernel, problem)
    if isinstance(bits, Support) or bits == record.row_bits:
        return bits if isinstance(bits, Support) else SUPPORTED
    _, ours = _load(problem, order, device)
    if not isinstance(ours, Support) and device.row_bits(ours, problem) == bits:
        return SUPPORTED
    return Support(f"its rows have other bits than those of the order {record.order} that it states")


def _order_of(problem: Problem, device: DeviceKernels) -> str | Support:
    """Return the order of a product: that of its rows, or without one that of an unsplit K; why not, if rows differ."""
    known = stated_orders.order_of(device.records.near_rows(problem, device.device.arch, device.device.compute_units))
    if known or isinstance(known, Support):
        return known
    for config in _candidates(problem.at(_MANY), device.target):
        order = _order_if_able(config, problem, device)
        if order is not None and order.runs == 1:
            return str(order)
    return Support(f"no kernel of ours adds up {problem.key} in an order that can be stated")


def _load(problem: Problem, order: str, device: DeviceKernels) -> tuple[Record, LoadedKernel | Support]:
    """Return the first candidate of an order that can be launched, or why the last one can't, with its record."""
    known = device.untuned.get(problem)
    if known is not None:
        return known
    here = device.device
    found: LoadedKernel | Support = Support(f"no kernel of ours adds up {problem.key} in the order {order}")
    record = Record(problem, here.arch, Config("", 0, 0, 0), "", _UNTUNED, 0.0, "")
    for config in _candidates(problem, device.target):
        if str(_order_if_able(config, problem, device)) != order:
            continue
        tools = {"triton": settings.version("triton")}
        record = Record(problem, here.arch, config, config.backend, _UNTUNED, 0.0, "", toolchain=tools, order=order)
        found = device.load_record(record)
        if not isinstance(found, Support):
            break
    device.untuned[problem] = record, found
    return record, found


def _order_if_able(config: Config, problem: Problem, device: DeviceKernels) -> ReductionOrder | None:
    """Return the order in which a config adds up a problem; None if it can't compute it, or none can be stated."""
    backend = registry.get(KernelBackend, config.backend)
    if not backend.check(config, problem, device.target):
        return None
    order = backend.reduction_order(config, problem, device.target)
    return order if isinstance(order, ReductionOrder) else None


def _candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Yield configs for a product, the tiles that fit its rows first: kernels of all M shall have one order."""
    deep = max(32, 128 // problem.a.type.bytes)
    depths = list(dict.fromkeys((128 if problem.scale_depth else deep, deep, 64, 128, 32)))
    few, some, many = (16, 64, 4, (("swap_ab", 1),)), (64, 64, 4, ()), (128, 128, 8, ())
    m = problem.group_m
    tiles = (few, some, many) if m <= _FEW else (some, few, many) if m <= _SOME else (many, some, few)
    template = "grouped" if problem.kind == "grouped" else "tile"
    # Where tiles would choose among instructions, all have the same one.
    alike = tuple((name, value) for name, value in (("matrix_instr_nonkdim", 16), ("kpack", 1)) if target.has(name))
    for several in ({}, {"runs": 2}, *({"runs": r, **pairs} for r in (4, 8) for pairs in ({}, {"pairwise": 1}))):
        for depth in depths:
            for rows, columns, warps, options in tiles:
                yield Config(template, rows, columns, depth, 1, 1, warps, 3, (*options, *alike, *several.items()))
    for splits in (1, 2):  # the orders of long sums in fp8, and of two splits of scaled blocks
        for depth in depths:
            low = Config("ws_tma_swapped", 16, 64, depth, 1, splits, 4, 4, (("swap_ab", 1),))
            high = Config("ws_tma", 128, 128, depth, 1, splits, 8, 4)
            yield from (low, high) if m <= _SOME else (high, low)
