"""Copies of tensors in memory that ends where nothing can be read."""

from pathlib import Path

import torch

from tests.support.tables import each
from tritongemm.measure.guarded_operands import guarded


@each(
    "tensor",
    [
        torch.arange(15.0).view(3, 5),
        torch.arange(15.0).view(3, 5).T,
        torch.arange(63).view(7, 9)[:, 2:5],
        torch.arange(5.0).expand(3, 5),
        torch.zeros(0, 4),
        torch.tensor(3),
        torch.ones(4096, dtype=torch.float8_e4m3fn),
    ],
)
def test_guarded_memory_holds_a_tensor_as_it_is(tensor: torch.Tensor) -> None:
    copy = guarded(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(copy.float(), tensor.float())
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()


@each("count", [1, 1024, 5000])
def test_nothing_can_be_read_or_written_behind_a_guarded_tensor(count: int) -> None:
    """Its last byte is the last of its pages, and the page behind it allows no access."""
    copy = guarded(torch.zeros(count, dtype=torch.int32))
    end = copy.data_ptr() + 4 * count
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    pages = {tuple(int(place, 16) for place in line[0].split("-")): line[1] for line in lines}
    access = {allowed for (start, stop), allowed in pages.items() if start <= end < stop}
    assert access == {"---p"} or access == {"---s"}
    assert any(start < end == stop and allowed.startswith("rw") for (start, stop), allowed in pages.items())
