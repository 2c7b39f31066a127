import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.mixtures import one_by_one
from tests.support.nouns import InputError, apart, cases, each, fails, refuses
from tests.support.operation_calls import CALLS, Rows
from tritongemm.numerics.verify import deviation
from tritongemm.operations.four_bit_weights import PackedWeight
from tritongemm.operations.linear_w4 import dequantize

N, K, GROUP = 24, 256, 64
GROUPS = K // GROUP
RANDOM = torch.Generator().manual_seed(5)
NUMBERS = torch.randint(0, 16, (N, K), generator=RANDOM)
# Powers of two that differ much from group to group and from column to column: one in another's place can't be missed.
SCALES = torch.randint(-10, 11, (GROUPS, N), generator=RANDOM).double().exp2() * 1.25
X = torch.randn(3, K, generator=RANDOM).bfloat16()
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of which an int32 has the bits, the lowest first
EIGHTS = 0x88888888 - 2**32
ASCENDING = torch.arange(K, dtype=torch.int32) // GROUP
ZEROS = torch.randint(0, 16, (GROUPS, N), generator=RANDOM)
ZEROS[0, :2] = torch.tensor([0, 15])  # both ends


def words(numbers: Tensor) -> Tensor:
    """Eight numbers [..., 8] in an int32, the first in its low bits."""
    found = sum(numbers[..., i] << 4 * i for i in range(8))
    return torch.where(found >= 2**31, found - 2**32, found).int()


def filled(value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


GPTQ = words(NUMBERS.t().reshape(K // 8, 8, N).mT)
AWQ = words(NUMBERS.t().reshape(K, N // 8, 8)[..., AWQ_COLUMNS])
COMPRESSED = words(NUMBERS.reshape(N, K // 8, 8))
HALF = SCALES.bfloat16()
CHECKPOINTS: dict[str, Any] = {
    "gptq": lambda **more: tritongemm.pack_gptq(GPTQ, HALF, filled(0x77777777, GROUPS, N // 8), ASCENDING, **more),
    "gptq_v2": lambda **more: tritongemm.pack_gptq(
        GPTQ, HALF, filled(EIGHTS, GROUPS, N // 8), checkpoint_format="gptq_v2", **more
    ),
    "awq": lambda **more: tritongemm.pack_awq(AWQ, HALF, filled(EIGHTS, GROUPS, N // 8), **more),
    "compressed-tensors": lambda **more: tritongemm.pack_compressed_tensors(
        COMPRESSED, HALF.t(), filled(EIGHTS, N // 8, GROUPS), ASCENDING, **more
    ),
}
OF_GPTQ, OF_AWQ = (words(ZEROS.view(GROUPS, N // 8, 8)[..., places]) for places in (range(8), AWQ_COLUMNS))
OF_COMPRESSED = words(ZEROS.t().reshape(N // 8, 8, GROUPS).mT)
ASYMMETRIC: dict[str, Any] = {
    "gptq": lambda **more: tritongemm.pack_gptq(GPTQ, HALF, words((ZEROS - 1).clamp(0).view(GROUPS, -1, 8)), **more),
    "gptq_v2": lambda **more: tritongemm.pack_gptq(GPTQ, HALF, OF_GPTQ, checkpoint_format="gptq_v2", **more),
    "awq": lambda **more: tritongemm.pack_awq(AWQ, HALF, OF_AWQ, **more),
    "compressed-tensors": lambda **more: tritongemm.pack_compressed_tensors(
        COMPRESSED, HALF.t(), OF_COMPRESSED, **more
    ),
}


@each("order", ["plain", "halves_32"])
@each("checkpoint", CHECKPOINTS)
def test_a_checkpoint_has_the_numbers_that_it_stores(checkpoint: str, order: str) -> None:
    packed: PackedWeight = CHECKPOINTS[checkpoint](order=order)
    assert packed.weight.is_contiguous() and packed.scale.is_contiguous()  # kernels take no others
    exact = X.double() @ ((NUMBERS - 8) * SCALES.t().repeat_interleave(GROUP, 1)).t()
    bias = torch.randn(N).bfloat16()
    assert deviation(tritongemm.linear_w4(X, *packed, bias=bias, out_dtype=torch.float32), exact + bias) < 2e-3
    swapped = packed._replace(weight=packed.weight << 4 | packed.weight >> 4)
    for wrong in (swapped, packed._replace(scale=packed.scale.roll(1, 0))):
        assert deviation(tritongemm.linear_w4(X, *wrong), exact) > 0.1


@pytest.mark.parametrize(("checkpoint", "order"), list(zip(ASYMMETRIC, ("plain", "halves_32") * 2, strict=True)))
def test_a_checkpoint_has_the_zero_points_that_it_stores(checkpoint: str, order: str) -> None:
    packed: PackedWeight = ASYMMETRIC[checkpoint](order=order)
    assert packed.scale.shape == (GROUPS, 2, N) and packed.scale.is_contiguous()
    zeros = ZEROS.clamp(1 if checkpoint == "gptq" else 0)  # GPTQ stores one less, and no -1
    weight = (NUMBERS - zeros.t().repeat_interleave(GROUP, 1)) * SCALES.t().repeat_interleave(GROUP, 1)
    exact = X.double() @ weight.t()
    assert deviation(tritongemm.linear_w4(X, *packed, out_dtype=torch.float32), exact) < 2e-3
    for moved in (packed.scale.roll(1, 0), packed.scale.roll(1, 2)):
        only_zeros = torch.stack((packed.scale[:, 0], moved[:, 1]), 1)
        assert deviation(tritongemm.linear_w4(X, *packed._replace(scale=only_zeros)), exact) > 0.02


@each("order", ["plain", "halves_32"])
def test_experts_are_packed_as_each_alone(order: str) -> None:
    given: dict[Any, tuple[Tensor, ...]] = {
        partial(tritongemm.pack_gptq, checkpoint_format="gptq_v2"): (GPTQ, HALF, OF_GPTQ),
        tritongemm.pack_awq: (AWQ, HALF, OF_AWQ),
        tritongemm.pack_compressed_tensors: (COMPRESSED, HALF.t(), OF_COMPRESSED),
    }
    for pack, tensors in given.items():
        each_alone = [tensors, tuple(one.roll(1, 0) for one in tensors)]
        packed = pack(*(torch.stack(pair) for pair in zip(*each_alone, strict=True)), order=order)
        for number, alone in enumerate(each_alone):
            wanted = pack(*alone, order=order)
            assert all(torch.equal(one[number], other) for one, other in zip(packed[:2], wanted[:2], strict=True))
    refuses(r"it is of floats \[2, groups, N=24\]", tritongemm.pack_gptq, torch.stack((GPTQ, GPTQ)), HALF)


@each("order", ["plain", "halves_32"])
def test_mxfp4_has_the_numbers_that_it_stores(order: str) -> None:
    blocks = (NUMBERS[:, ::2] | NUMBERS[:, 1::2] << 4).byte().view(N, K // 32, 16)
    exponents = torch.randint(117, 138, (N, K // 32), generator=RANDOM).byte()
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = torch.tensor([*magnitudes, *(-value for value in magnitudes)], dtype=torch.float64)
    weight = values[NUMBERS] * (exponents.double() - 127).exp2().repeat_interleave(32, 1)
    packed = tritongemm.pack_mxfp4(blocks, exponents, order=order)
    for x in (X, X.half()):  # powers beyond fp16 too, which PyTorch multiplies in float32
        assert deviation(tritongemm.linear_w4(x, *packed, out_dtype=torch.float32), x.double() @ weight.t()) < 1e-4
    two = tritongemm.pack_mxfp4(blocks.expand(2, -1, -1, -1), exponents.expand(2, -1, -1), order=order)
    assert torch.equal(two.weight[1], packed.weight) and torch.equal(two.scale[1], packed.scale)


@each("order", ["plain", "fragments"])
def test_nvfp4_has_the_numbers_that_it_stores(order: str) -> None:
    numbers = NUMBERS.repeat(2, 1)  # of a multiple of 16 columns
    weight = (numbers[:, ::2] | numbers[:, 1::2] << 4).byte()
    of_groups = torch.randint(-6, 7, (2 * N, K // 16), generator=RANDOM).double().exp2() * 1.125
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = torch.tensor([*magnitudes, *(-value for value in magnitudes)], dtype=torch.float64)
    exact = values[numbers] * of_groups.repeat_interleave(16, 1) * 3e-4
    stored, second = of_groups.to(torch.float8_e4m3fn), torch.tensor([3e-4])
    assert torch.equal(stored.double(), of_groups)
    packed = tritongemm.pack_nvfp4(weight, stored, second, order=order)
    assert packed.scale.nbytes == 2 * stored.nbytes and packed.scale.is_contiguous() and packed.weight.is_contiguous()
    for x in (X, X.half()):
        assert deviation(tritongemm.linear_w4(x, *packed, out_dtype=torch.float32), x.double() @ exact.t()) < 4e-3
    divided = tritongemm.pack_nvfp4(weight, stored, 1 / second, checkpoint_format="compressed-tensors", order=order)
    assert deviation(divided.scale, packed.scale.double()) < 1e-2 and torch.equal(divided.weight, packed.weight)
    for wrong in (
        packed._replace(weight=packed.weight << 4 | packed.weight >> 4),
        packed._replace(scale=packed.scale.roll(1, 0)),
    ):
        assert deviation(tritongemm.linear_w4(X, *wrong), X.double() @ exact.t()) > 0.1


def test_factors_of_long_groups_and_scales_that_are_refused() -> None:
    for k, groups, stored in ((256, 2, 2), (256, 1, 2), (96, 1, 3)):
        scale = HALF[:groups]
        packed = tritongemm.pack_gptq(GPTQ[: k // 8], scale, dtype=torch.float16)
        assert packed.scale.shape == (stored, N) and packed.scale.dtype == torch.float16
        assert torch.equal(packed.scale[-1].bfloat16(), scale[-1])
    refuses(r"hold NaN or infinity, as torch\.float16", tritongemm.pack_gptq, GPTQ, HALF * 2**14, dtype=torch.float16)
    refuses("multiples of 128", tritongemm.pack_gptq, GPTQ, HALF, order="halves_128")
    with pytest.raises(InputError, match="checkpoint_format is 'marlin'; there are: gptq, gptq_v2"):
        tritongemm.pack_gptq(GPTQ, HALF, checkpoint_format="marlin")
    x, weight, scale = torch.ones(2, 100).bfloat16(), torch.zeros(8, 50, dtype=torch.uint8), torch.ones(3, 8).bfloat16()
    refuses("K=100 is no multiple of 32, the shortest group", tritongemm.linear_w4, x, weight, scale)
    nan = torch.full((1, 8), torch.nan).bfloat16()
    refuses("scale holds NaN", tritongemm.linear_w4, torch.ones(2, 32).bfloat16(), weight[:, :16], nan)


def test_a_gradient_reaches_the_activations_through_any_order() -> None:
    packed, x = CHECKPOINTS["gptq"](), X.clone().requires_grad_()
    tritongemm.linear_w4(x, *packed).sum().backward()
    assert deviation(x.grad, ((NUMBERS - 8) * SCALES.t().repeat_interleave(GROUP, 1)).sum(0).expand(3, -1)) < 2e-2
    packed = CHECKPOINTS["gptq"]()
    ordered = tritongemm.pack_weight(packed.weight, "halves_32")
    assert torch.equal(ordered, CHECKPOINTS["gptq"](order="halves_32").weight)
    assert torch.equal(tritongemm.unpack_weight(ordered, "halves_32"), packed.weight)


BYTES, ONE_FACTOR = torch.zeros(N, K // 2, dtype=torch.uint8), torch.ones(1)
FACTORS = torch.ones(N, K // 16).to(torch.float8_e4m3fn)


@cases(
    ("pack_gptq", (GPTQ, HALF, filled(0x777F7777, GROUPS, N // 8)), "the zero point 16; a number .* from 0 to 15"),
    ("pack_gptq", (GPTQ, HALF, None, ASCENDING.flip(0)), "desc_act"),
    ("pack_gptq", (GPTQ.long(), HALF), r"qweight is torch.int64 \(32, 24\); it is int32 \[K / 8, N\]"),
    ("pack_gptq", (GPTQ, HALF[:3]), r"scales is .* \(3, 24\); it is of floats \[groups, N=24\].* divide K=256"),
    ("pack_gptq", (GPTQ, HALF.repeat(4, 1)), "groups of 16 along K have no kernels"),
    ("pack_gptq", (GPTQ, HALF * float("nan")), "hold NaN or infinity"),
    ("pack_gptq", (GPTQ, HALF.tolist()), "scales must be a tensor, not list"),
    ("pack_awq", (AWQ, HALF, filled(EIGHTS, GROUPS, N)), r"qzeros is \(4, 24\); beside .* it is \(4, 3\)"),
    ("pack_compressed_tensors", (COMPRESSED, HALF), r"weight_scale is .* \(4, 24\); .* \[N=24, groups\]"),
    ("pack_compressed_tensors", (COMPRESSED, HALF.t(), None, ASCENDING.flip(0)), "actorder"),
    ("pack_mxfp4", (torch.zeros(N, 8, 15).byte(), torch.zeros(N, 8).byte()), r"blocks are .* \(24, 8, 15\)"),
    ("pack_mxfp4", (torch.zeros(N, 8, 16).byte(), torch.full((N, 8), 255).byte()), "scales hold NaN"),
    ("pack_nvfp4", (BYTES, FACTORS[:, 1:], ONE_FACTOR), r"weight_scale \(24, 15\); they are uint8 \[N, K / 2\]"),
    ("pack_nvfp4", (BYTES, FACTORS.float(), ONE_FACTOR), "weight_scale is torch.float32, global_scale"),
    ("pack_nvfp4", (BYTES, FACTORS, ONE_FACTOR.repeat(3)), r"\(3,\); they are .* split layers"),
    ("pack_nvfp4", (BYTES, FACTORS, ONE_FACTOR * float("nan")), "holds NaN or infinity"),
)  # fmt: skip
def test_what_no_kernel_reads_is_refused(function: str, given: Any, said: str, /) -> None:
    fails((InputError, TypeError), said, getattr(tritongemm, function), *given)


ONE = torch.ones(8, N)
RIGHT: dict[str, Any] = {"x": X, "weight": CHECKPOINTS["gptq"]().weight, "scale": HALF}


@cases(
    ({"weight": 3}, "weight must be a tensor, not int"),
    ({"x": X.float()}, r"x is torch\.float32; activations beside four bits"),
    ({"x": X[:, 1:]}, r"x is \(3, 255\); .* it is \[..., 256\]"),
    ({"weight": RIGHT["weight"].char()}, r"weight is torch\.int8 \(24, 128\); it is uint8"),
    ({"scale": SCALES.float()}, r"scale is torch\.float32; of fp4 it is e8m0 .*, of int4 x's type"),
    ({"scale": HALF[:3]}, r"scale is .* \(3, 24\); for N=24, K=256 it is \[2 or 4 or 8 groups .* groups divide K"),
    ({"scale": HALF[:, None].repeat(1, 3, 1)}, r"with zero points \[groups, 2, 24\]"),
    ({"scale": ONE.byte()}, r"or of fp4 \[24, 8\] e8m0 or \[16, 24\] bfloat16"),
    ({"scale": HALF.to("meta")}, "scale is on meta"),
    ({"order": "backwards"}, "no weight layout is called 'backwards'"),
    ({"order": "halves_128"}, "multiples of 128; weight has N 24 and K 256"),
    ({"scale_x": ONE[:, :1]}, r"x is torch\.bfloat16; .* or with a scale_x fp8 or int8"),
    ({"x": X.to(torch.float8_e4m3fn), "scale_x": ONE}, r"scale_x is torch\.float32 \(8, 24\); .* of 3 rows"),
    ({"bias": ONE[0, 1:]}, r"bias is \(23,\)"),
    ({"out_dtype": torch.int8}, r"out_dtype is torch\.int8"),
)
def test_wrong_operands_are_named_before_a_launch(wrong: dict[str, Any], said: str, /) -> None:
    fails((InputError, TypeError), said, tritongemm.linear_w4, **RIGHT | wrong)


def test_ascending_groups_of_unequal_length_are_refused() -> None:
    """Their factors would multiply other numbers than their own."""
    uneven = ASCENDING.clone()
    uneven[GROUP - 1] = 1
    packed, scale = torch.zeros(N, K // 8, dtype=torch.int32), torch.ones(N, GROUPS).bfloat16()
    for usual in (ASCENDING, torch.full_like(ASCENDING, -1)):
        assert tritongemm.pack_compressed_tensors(packed, scale, None, usual).scale.shape == (GROUPS, N)
    refuses("weight_g_idx has groups in another order", tritongemm.pack_compressed_tensors, packed, scale, None, uneven)


def test_experts_of_gpt_oss_are_multiplied_as_they_are() -> None:
    """mxfp4 with the clamped SwiGLU and biases; a wrong expert's bias, and swapped halves of bytes, are noticed."""
    experts, hidden, inner, tokens, topk = 3, 64, 32, 5, 2
    w1, w2 = (
        torch.randint(0, 256, (experts, n, k // 2), generator=RANDOM).byte()
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    s1, s2 = (torch.randint(120, 128, (*w.shape[:2], w.shape[2] // 16), generator=RANDOM).byte() for w in (w1, w2))
    b1, b2 = torch.randn(experts, 2 * inner, generator=RANDOM), torch.randn(experts, hidden, generator=RANDOM)
    x, weights = torch.randn(tokens, hidden, generator=RANDOM).bfloat16(), torch.rand(tokens, topk, generator=RANDOM)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 7], [0, 2]])
    entire = [
        torch.stack([dequantize(one, factor, "plain", torch.float64) for one, factor in zip(w, s, strict=True)])
        for w, s in ((w1, s1), (w2, s2))
    ]
    exact = one_by_one(x, entire, weights, ids, "clamped_swiglu", biases=(b1, b2))

    def compute(w: Tensor, bias: Tensor) -> Tensor:
        return tritongemm.fused_moe(
            x, w, w2, weights, ids, "clamped_swiglu", s1, s2, w1_bias=bias, w2_bias=b2, keep_activations=True
        )

    assert deviation(compute(w1, b1), exact) < 0.03
    for w, bias in ((w1 << 4 | w1 >> 4, b1), (w1, b1.roll(1, 0))):
        assert deviation(compute(w, bias), exact) > 0.1
    refuses(r"w1_bias is .* \(3, 64\) floats, a row for each expert", compute, w1, b1[:1])
    with pytest.raises(InputError, match="are for weights of four bits"):
        wide = torch.zeros(3, 4, 64).bfloat16(), torch.zeros(3, 64, 2).bfloat16()
        tritongemm.fused_moe(x, *wide, weights, ids, keep_activations=True)


@apart(
    ("fused_moe", {"w1_scale": 1.0}, "w1_scale must be a tensor"),
    ("fused_moe", {"w1_scale": torch.ones(3, 2, 255).bfloat16()}, r"scale is .* \(2, 255\); for N=256, K=256"),
    ("fused_moe", {"w2_scale": torch.ones(2, 4, 256).bfloat16()}, "factors of each of 3 groups"),
    ("fused_moe", {"x": torch.ones(5, 256)}, r"a is torch\.float32; beside weights of four bits"),
    ("fused_moe", {"order": "backwards"}, "no weight layout is called"),
    ("grouped_mm", {"scale_b": torch.ones(2, 2, 128).bfloat16()}, "factors of each of 3 groups"),
    ("grouped_mm", {"b": torch.zeros(3, 128, 128).byte()}, "b has strides"),
    ("grouped_mm", {"a": torch.ones(5, 100).bfloat16()}, r"K / 2, N\]"),
)
def test_wrong_operands_of_experts_are_named(name: str, wrong: dict[str, Any], said: str, /) -> None:
    call = CALLS[f"{name} int4"](Rows(5))
    right = dict(zip(inspect.signature(call.function).parameters, call.given, strict=False)) | call.named
    fails((InputError, TypeError), said, call.function, **right | wrong)


@pytest.mark.parametrize("granularity", ["row", "block", "mx"])
def test_quantised_activations_have_factors_of_their_own(granularity: str) -> None:
    x = torch.randn(2, 3, K, generator=RANDOM) * torch.arange(1, 4)[:, None] * torch.arange(K).div(64).exp2()
    q, scale_x = tritongemm.quantize(x, granularity, dtype=torch.float8_e4m3fn)
    weight = torch.randint(0, 256, (N, K // 2), generator=RANDOM).byte()
    powers = torch.randint(117, 138, (N, K // 32), generator=RANDOM).byte()
    exact = x.double() @ dequantize(weight, powers, "plain", torch.float64).t()
    found = tritongemm.linear_w4(q, weight, powers, scale_x=scale_x)
    assert found.dtype == torch.bfloat16 and deviation(found, exact) < 0.2  # the rounding of fp8
    assert (
        deviation(tritongemm.linear_w4(q, weight, powers, scale_x=scale_x.flip(-1 if scale_x.dim() > 2 else 0)), exact)
        > 0.1
    )


def of_marlin(numbers: Tensor) -> Tensor:
    """Words of numbers [K, N], thread by thread of a warp, as Marlin's description has them."""
    k, n = numbers.shape
    found = torch.empty(k // 16, 2 * n, 8, dtype=torch.int64)
    for thread in range(32):
        for tile in range(4):
            rows = [2 * (thread % 4) + row for row in (0, 1, 8, 9)]
            eight = [(row, column) for column in [16 * tile + thread // 4, 16 * tile + thread // 4 + 8] for row in rows]
            for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                row, column = eight[which]
                found[:, thread * 4 + tile :: 128, place] = numbers[row::16, column::64]
    return words(found)


@each("zeros", [False, True])
@each("groups", [1, 4])
def test_marlins_order_has_the_numbers_that_were_packed(groups: int, zeros: bool) -> None:
    n, generator = 128, torch.Generator().manual_seed(9)
    numbers, points = (torch.randint(0, 16, (rows, n), generator=generator) for rows in (K, groups))
    scales = torch.randint(-10, 11, (groups, n), generator=generator).double().exp2() * 1.25
    by_groups = [i + 8 * j for i in range(8) for j in range(8)]
    by_columns = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    permuted = scales.reshape(-1, 64)[:, by_groups] if groups > 1 else scales.reshape(-1, 32)[:, by_columns]
    places = points.reshape(-1, 64)[:, by_groups].reshape(groups, -1, 8)[..., (0, 2, 4, 6, 1, 3, 5, 7)]
    given = of_marlin(numbers), permuted.reshape(groups, n).bfloat16(), words(places) if zeros else None
    packed = tritongemm.pack_marlin(*given, order="halves_32")
    exact = (numbers - (points if zeros else torch.full_like(points, 8)).repeat_interleave(K // groups, 0)).double()
    exact *= scales.repeat_interleave(K // groups, 0)
    assert deviation(tritongemm.linear_w4(X, *packed, out_dtype=torch.float32), X.double() @ exact) < 2e-3
    refuses("blocks of 64 columns have 128 words", tritongemm.pack_marlin, given[0][:, :96], given[1])
