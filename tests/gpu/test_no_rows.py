"""Products of no rows on a real GPU: an empty result, for which nothing is launched."""

import warnings

import pytest
import torch

from tests.support import no_rows
from tests.support.no_rows import Rows, tensors
from tritongemm.serving.quantize import own_fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# PyTorch's own products of eight bits convert the weight or make a factor, and a factor of all numbers is written.
LAUNCHING = ("mm fp8", "mm int8", "gemm_a16w16 scaled", "quantize tensor")


@pytest.mark.parametrize("name", no_rows.CALLS)
def test_no_rows_give_an_empty_result_and_launch_nothing(name: str) -> None:
    """A graph that is captured of a call has nothing in it, of which PyTorch warns."""
    call, fp8 = no_rows.CALLS[name], own_fp8(torch.device("cuda", 0))
    rows = Rows(0, "cuda", fp8)
    wanted = [(t.shape, t.dtype) for t in tensors(call(Rows(0, fp8=fp8)))]
    found = tensors(call(rows))  # which makes the operands
    assert [(t.shape, t.dtype) for t in found] == wanted and all(t.is_cuda for t in found)
    with warnings.catch_warnings(record=True) as warned, torch.cuda.graph(torch.cuda.CUDAGraph()):
        warnings.simplefilter("always")
        again = tensors(call(rows))
    assert [(t.shape, t.dtype) for t in again] == wanted
    assert name in LAUNCHING or any("CUDA Graph is empty" in str(one.message) for one in warned)
