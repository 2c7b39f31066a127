"""Products of no rows on a real GPU: an empty result, for which nothing is launched."""

import warnings

import pytest
import torch

from tests.gpu.here import needs_gpu
from tests.support.operation_calls import CALLS, Rows, parts
from tritongemm.serving.quantize import own_fp8

pytestmark = needs_gpu
# PyTorch's own products of eight bits convert the weight or make a factor, and a factor of all numbers is written.
LAUNCHING = ("mm fp8", "mm int8", "gemm_a16w16 scaled", "quantize tensor")


@pytest.mark.parametrize("name", CALLS)
def test_no_rows_give_an_empty_result_and_launch_nothing(name: str) -> None:
    """A graph that is captured of a call has nothing in it, of which PyTorch warns."""
    fp8 = own_fp8(torch.device("cuda", 0))
    call = CALLS[name](Rows(0, "cuda", fp8))
    wanted = [(t.shape, t.dtype) for t in parts(CALLS[name](Rows(0, fp8=fp8))())]
    found = parts(call())
    assert [(t.shape, t.dtype) for t in found] == wanted and all(t.is_cuda for t in found)
    with warnings.catch_warnings(record=True) as warned, torch.cuda.graph(torch.cuda.CUDAGraph()):
        warnings.simplefilter("always")
        again = parts(call())
    assert [(t.shape, t.dtype) for t in again] == wanted
    assert name in LAUNCHING or any("CUDA Graph is empty" in str(one.message) for one in warned)
