"""Kernel source: the library, where it won the tuning of exactly this size."""

from typing import ClassVar

import torch

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.source_row import baseline_won, kind_of


class LibraryWinner(KernelSource):
    """The library that users run today, where it won: PyTorch's own kernel, or PyTorch where that is not known."""

    rank: ClassVar[int] = 20

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return PyTorch's kernel, or PyTorch, for a size that the library won."""
        record = device.find_record(call.problem)
        if isinstance(record, Support) or record.predicted or not baseline_won(record):
            return Support("no library won the tuning of this size")
        text = f"{record.winner} won the tuning of {record.problem.key} on {device.device.arch}"
        kind = kind_of(record, call.problem.m)
        if kind == "bucket":
            text += f", the padded M of {call.problem.m}"
        elif kind == "range":
            text += f", whose range of M is {record.m_from} to {record.problem.m}"
        is_looked_for = not call.vector and (call.frequent or kind != "range")  # which takes a millisecond an M
        kernel = device.torch_kernels.find(call.problem, call.precision) if is_looked_for else None
        if kernel is None:
            return Resolution("library", text, lasting=not torch.cuda.is_current_stream_capturing())
        return Resolution("library", f"{text}; PyTorch's kernel, called directly", kernel, record=record)
