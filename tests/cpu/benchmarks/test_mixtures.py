"""benchmarks/_mixtures.py: a layer of experts in two calls of a product is the layer of experts."""

import importlib
import os
from types import ModuleType

import pytest
import torch

import tritongemm
from tests.support import ROOT, forked

TOKENS, EXPERTS, TOPK, HIDDEN, INNER = 7, 4, 2, 256, 128


@pytest.fixture
def mixtures() -> ModuleType:
    return importlib.import_module("_mixtures")


def test_places_leave_room_between_experts(mixtures: ModuleType) -> None:
    cpu = torch.device("cpu")
    contiguous = mixtures.contiguous_places([3, 0, 9], 8, cpu)
    assert contiguous.shape == (24,) and contiguous.at.tolist() == [0, 1, 2, *range(8, 17)]
    assert contiguous.whose.tolist() == [0] * 3 + [-1] * 5 + [2] * 9 + [-1] * 7
    masked = mixtures.masked_places([3, 0, 9], 8, cpu)
    assert masked.shape == (3, 16) and masked.at.tolist() == [0, 1, 2, *range(32, 41)]
    assert masked.whose.tolist() == [3, 0, 9]


@pytest.mark.parametrize(("mode", "most"), [("", 0.02), ("row", 0.08), ("block", 0.08)])
def test_public_calls_are_near_float64(mixtures: ModuleType, mode: str, most: float) -> None:
    torch.manual_seed(0)
    made = mixtures.make_mixture(TOKENS, EXPERTS, TOPK, HIDDEN, INNER, mode, torch.float8_e4m3fn, "cpu")
    exact = mixtures.reference(made)
    assert sum(made.counts) == TOKENS * TOPK
    for result in (mixtures.by_public_calls(made), tritongemm.fused_moe(*made.arguments)):
        assert result.shape == made.x.shape and mixtures.deviation(result, exact) < most
    assert mixtures.deviation(mixtures.by_public_calls(made).flip(1), exact) > 0.5


PADDED_CALLS = """
import _common
import torch
from _mixtures import *
from _mixtures import _wide

def stand_in(left, right, out, places):
    (a, of_a), (w, of_w) = left, right
    a = a.double()
    if of_a is not None:
        assert of_a.shape == (*places.shape, a.shape[-1] // 128) and of_a.stride(-2) == 1
        a = a * of_a.double().repeat_interleave(128, -1)
    out.fill_(float("nan"))  # what is between experts belongs to none
    for expert in range(w.shape[0]):
        b = _wide(w, of_w, expert).T
        if len(places.shape) == 2:
            rows = int(places.whose[expert])
            out[expert, :rows] = (a[expert, :rows] @ b).to(out.dtype)
        else:
            its = places.whose == expert
            assert not its.any() or int(its.nonzero()[0]) %% 16 == 0
            out[its] = (a[its] @ b).to(out.dtype)

torch.manual_seed(0)
for mode, most in (("", 0.02), ("block", 0.12)):  # the interpreter truncates what it makes fp8 of
    mixture = make_mixture(%d, %d, %d, %d, %d, mode, torch.float8_e4m3fn, "cpu")
    exact, cpu = reference(mixture), torch.device("cpu")
    for places in (contiguous_places(mixture.counts, 16, cpu), masked_places(mixture.counts, 16, cpu)):
        error = deviation(PaddedCalls(mixture, places, stand_in)(), exact)
        assert error < most, (mode, places.shape, error)
print("near")
"""


@pytest.mark.heavy  # it interprets kernels; the public calls are quick
def test_products_that_want_room_between_experts_compute_the_same() -> None:
    """The kernels around them are interpreted."""
    folders = os.pathsep.join(map(str, (ROOT / "benchmarks", ROOT)))
    program = ["-c", PADDED_CALLS % (TOKENS, EXPERTS, TOPK, HIDDEN, INNER)]
    ran = forked.run(program, ROOT, {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": folders})
    assert ran.stdout == "near\n", ran.stderr[-3000:]
