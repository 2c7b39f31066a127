import torch
from torch.nn import functional

import tritongemm
from tests.support.nouns import apart, refuses
from tritongemm.numerics.verify import deviation

X, GATE, UP = (torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) for rows in (5, 256, 257))
UP = UP[1:]


def test_gate_and_up_are_those_of_separate_weights() -> None:
    w, bias = tritongemm.interleave_gate_up(GATE, UP), tritongemm.interleave_gate_up(GATE[:, 0], UP[:, 0])
    gate, up = functional.linear(X, GATE, GATE[:, 0]).double(), functional.linear(X, UP, UP[:, 0]).double()
    found = tritongemm.linear_act(X[None], w, "gelu_tanh_mul", bias)
    assert found.shape == (1, 5, 256) and deviation(found[0], functional.gelu(gate, approximate="tanh") * up) < 1e-5
    q, factors = tritongemm.linear_act_quantize(X[None], w, "silu_mul", bias)
    assert (q.shape, q.dtype, factors.shape, factors.stride()) == ((1, 5, 256), torch.float8_e4m3fn, (5, 2), (1, 5))
    assert deviation(q[0].double() * factors.double().repeat_interleave(128, 1), functional.silu(gate) * up) < 2**-4
    narrow = tritongemm.linear_act(X, GATE, "silu", GATE[:, 0], q.dtype)
    assert narrow.dtype == q.dtype and deviation(narrow.double(), functional.silu(gate)) < 2**-4
    assert q.float().abs().amax(-1).max() == 448 and tritongemm.linear_act_quantize(X, GATE)[0].shape == (5, 256)


def test_rows_of_gate_in_turn_are_those_that_share_factors() -> None:
    x, w, of_x = X[:, :32].to(torch.float8_e4m3fn), GATE[:, :32].to(torch.float8_e4m3fn), torch.ones(5, 1)
    found = tritongemm.linear_act(x, w[:128], "silu_mul", None, None, of_x, torch.ones(128))
    for factors in (torch.ones(1, 128), torch.ones(128, 1)):  # as many as rows are in blocks of 128 x 128 apart
        same = tritongemm.linear_act(x, w[:128], "silu_mul", None, None, of_x, factors)
        torch.testing.assert_close(same, found)
    given = (x, w[:192], "silu_mul", None, None, of_x, torch.ones(2, 1))
    refuses("with silu_mul it has 128 rows of gate, then 128 of up", tritongemm.linear_act, *given)


@apart(
    ((X, GATE, "swish"), "act is 'swish'; it may be silu, gelu"),
    ((X, GATE[:24], "silu_mul"), "with silu_mul it has 8 rows of gate, then 8 of up"),
    ((X, GATE[:64], "block"), "of 64 columns; blocks are of fp8, and of 128"),
    ((X, GATE, "relu", None, torch.int32), "activations are of floats"),
    ((X, GATE, "add"), "the residual is None; it must be"),
    ((X, GATE, "relu", GATE[:31, 0]), r"bias \(31,\) and w .* must be \[N\] and \[N, K\]"),
    ((X, GATE[:, :95], "relu"), r"must be \[..., K\] and \[N, K\]"),
)
def test_refusals(given: tuple[torch.Tensor, torch.Tensor, str], reason: str, /) -> None:
    refuses(reason, tritongemm.linear_act, *given)
    refuses("rows a multiple of 8", tritongemm.interleave_gate_up, GATE[:12], UP[:12])
    refuses("of one shape and type", tritongemm.interleave_gate_up, GATE, UP.double())
    refuses("run is 0; give a number of rows", tritongemm.interleave_gate_up, GATE, UP, 0)
