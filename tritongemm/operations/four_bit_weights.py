"""Public calls that convert weights of four bits, as checkpoints store them, to what `linear_w4` takes, once at load.

What a kernel has no operand for is refused: columns of K in another order.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import E8M0_NAN, INT4_ZERO
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN
from tritongemm.core.scaling import MX_DEPTH, NV_DEPTH, WEIGHT_DEPTHS
from tritongemm.operations.checks import check_tensors
from tritongemm.operations.factors import EXPONENTS
from tritongemm.operations.linear_w4 import ACTIVATIONS, read_weight
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import WeightLayout

_IN_A_WORD: Final = 8  # numbers of four bits in an int32
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of an int32 where AWQ has the columns 0 to 7
_MARLIN_WORDS: Final = 128  # of 16 rows along K of 64 columns
_LESS: Final = {"gptq": 1, "gptq_v2": 0}  # what zero points are stored less
_MULTIPLIES: Final = {"modelopt": True, "compressed-tensors": False}  # whether nvfp4's second factor does
_LAST: Final = 15  # of the zero points, which are numbers that a weight may have


class PackedWeight(NamedTuple):
    """A weight as `linear_w4` takes it: ``linear_w4(x, *packed)``."""

    weight: Tensor  # bytes [..., N, K / 2]
    # Factors [..., K / 32, N] (or 64, 128) of int4, with zero points [..., K / 32, 2, N]; of fp4 e8m0
    # [..., N, K / 32] or bfloat16 [K / 16, N].
    scale: Tensor
    order: str  # memory layout of the bytes


def pack_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    checkpoint_format: str = "gptq",
    dtype: torch.dtype | None = None,
    order: str = PLAIN,
) -> PackedWeight:
    """Return a weight of GPTQ's as `linear_w4` takes it, or those of experts, with their number in front of each shape.

    Args:
        qweight: int32 [K / 8, N].
        scales: [K / group, N] floats; groups are of a multiple of 32 numbers.
        qzeros: int32 [K / group, N / 8]; None where the weight is symmetric.
        g_idx: the group of each number along K, in ascending groups of one length (no ``desc_act``), or None; of
            experts None.
        checkpoint_format: ``gptq``, whose zero points are stored less one, or ``gptq_v2``.
        dtype: of activations; by default that of the scales.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together, a zero point out of range, or K in another order.

    Examples:
        >>> qweight, scales = torch.zeros(32, 64, dtype=torch.int32), torch.ones(2, 64).half()
        >>> tritongemm.pack_gptq(qweight, scales).weight.shape
        torch.Size([64, 128])
    """
    _check_words("qweight", qweight, "[K / 8, N]")
    if checkpoint_format not in _LESS:
        raise InputError(f"checkpoint_format is {checkpoint_format!r}; there are: {', '.join(_LESS)}")
    *experts, rows, n = qweight.shape
    k = rows * _IN_A_WORD
    _check_scales("scales", scales, (*experts, k, n))
    if g_idx is not None:
        _check_groups("g_idx", g_idx, k, scales.shape[-2], "desc_act")
    zeros = None
    if qzeros is not None:
        zeros = _zero_points("qzeros", qzeros, (*scales.shape[:-1], n // _IN_A_WORD)).flatten(-2)
        zeros = _in_range("qzeros", zeros + _LESS[checkpoint_format])
    return _packed(qweight.mT.contiguous().view(torch.uint8), scales, zeros, dtype, order)


def pack_awq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor, *, dtype: torch.dtype | None = None, order: str = PLAIN
) -> PackedWeight:
    """Return a weight of AWQ's (the version GEMM) as `linear_w4` takes it, or those of experts, with their number in
    front of each shape.

    Args:
        qweight: int32 [K, N / 8].
        scales: [K / group, N] floats.
        qzeros: int32 [K / group, N / 8].
        dtype: of activations; by default that of the scales.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together.

    Examples:
        >>> qweight, qzeros = torch.zeros(256, 8, dtype=torch.int32), torch.full((2, 8), -2004318072, dtype=torch.int32)
        >>> tritongemm.pack_awq(qweight, torch.ones(2, 64).half(), qzeros).weight.shape
        torch.Size([64, 128])
    """
    _check_words("qweight", qweight, "[K, N / 8]")
    *extents, words = qweight.shape
    _check_scales("scales", scales, (*extents, words * _IN_A_WORD))
    zeros = _zero_points("qzeros", qzeros, (*scales.shape[:-1], words))[..., _AWQ_PLACES].flatten(-2)
    columns = _numbers(qweight)[..., _AWQ_PLACES].flatten(-2).mT
    return _packed(columns[..., ::2] | columns[..., 1::2] << 4, scales, zeros, dtype, order)


def pack_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    order: str = PLAIN,
) -> PackedWeight:
    """Return a weight of compressed-tensors' format ``pack-quantized`` as `linear_w4` takes it, or those of experts,
    with their number in front of each shape.

    Args:
        weight_packed: int32 [N, K / 8].
        weight_scale: [N, K / group] floats.
        weight_zero_point: int32 [N / 8, K / group], or None where the weight is symmetric.
        weight_g_idx: the group of each number along K, in ascending groups of one length; all -1, or None, says so;
            of experts None.
        dtype: of activations; by default that of the scales.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together, or K in another order.

    Examples:
        >>> packed, scale = torch.zeros(64, 32, dtype=torch.int32), torch.ones(64, 2).bfloat16()
        >>> tritongemm.pack_compressed_tensors(packed, scale).scale.shape
        torch.Size([2, 64])
    """
    _check_words("weight_packed", weight_packed, "[N, K / 8]")
    *experts, n, words = weight_packed.shape
    k = words * _IN_A_WORD
    scales = weight_scale.mT if isinstance(weight_scale, Tensor) and weight_scale.dim() > 1 else weight_scale
    _check_scales("weight_scale", scales, (*experts, k, n), turned=True)
    zeros = None
    if weight_zero_point is not None:
        wanted = (*experts, n // _IN_A_WORD, scales.shape[-2])
        zeros = _zero_points("weight_zero_point", weight_zero_point, wanted).transpose(-3, -2).flatten(-2)
    if weight_g_idx is not None and not bool((weight_g_idx == -1).all()):
        _check_groups("weight_g_idx", weight_g_idx, k, scales.shape[-2], "actorder")
    return _packed(weight_packed.contiguous().view(torch.uint8), scales, zeros, dtype, order)


def pack_marlin(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    order: str = PLAIN,
) -> PackedWeight:
    """Return a weight of int4 in Marlin's order, for activations of 16 bits, as `linear_w4` takes it.

    vLLM and SGLang convert checkpoints to this order when they load them.

    Args:
        qweight: int32 [K / 16, 2 * N], of K in order (no ``desc_act``).
        scales: [K / group, N] floats, permuted as Marlin reads them; one group is a factor for each column.
        qzeros: int32 [K / group, N / 8], permuted likewise; None where the weight is symmetric.
        dtype: of activations; by default that of the scales.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together.

    Examples:
        >>> qweight, scales = torch.zeros(16, 128, dtype=torch.int32), torch.ones(2, 64).half()
        >>> tritongemm.pack_marlin(qweight, scales).weight.shape
        torch.Size([64, 128])
    """
    _check_words("qweight", qweight, "[K / 16, 2 * N]", (2,))
    k, n = qweight.shape[0] * 16, qweight.shape[1] // 2
    if qweight.shape[1] % _MARLIN_WORDS:
        raise InputError(f"qweight is {tuple(qweight.shape)}; Marlin's blocks of 64 columns have {_MARLIN_WORDS} words")
    _check_scales("scales", scales, (k, n))
    # A thread has of 16 x 16 numbers four neighbours along K, in two pairs 8 apart, of two columns 8 apart.
    threads = _numbers(qweight).view(k // 16, n // 64, 8, 4, 4, 2, 2, 2)
    numbers = threads.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(n, k)
    zeros = None
    if qzeros is not None:
        pairs = _zero_points("qzeros", qzeros, (scales.shape[0], n // _IN_A_WORD)).unflatten(-1, (2, 4)).mT
        zeros = pairs.reshape(-1, 8, 8).mT.reshape(scales.shape)
    grouped = scales.shape[0] > 1
    blocks = scales.reshape(-1, 8, 8).mT if grouped else scales.reshape(-1, 4, 4, 2).transpose(1, 2)
    return _packed(numbers[:, ::2] | numbers[:, 1::2] << 4, blocks.reshape(scales.shape), zeros, dtype, order)


def pack_mxfp4(blocks: Tensor, scales: Tensor, *, order: str = PLAIN) -> PackedWeight:
    """Return a weight of mxfp4, as gpt-oss has it, as `linear_w4` takes it.

    Args:
        blocks: bytes [..., N, K / 32, 16], each of two numbers e2m1, the earlier one in the low half.
        scales: e8m0 [..., N, K / 32], bytes or ``torch.float8_e8m0fnu``.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together, or a power that is NaN.

    Examples:
        >>> blocks, scales = torch.zeros(64, 8, 16, dtype=torch.uint8), torch.full((64, 8), 127, dtype=torch.uint8)
        >>> tritongemm.pack_mxfp4(blocks, scales).weight.shape
        torch.Size([64, 128])
    """
    check_tensors({"blocks": blocks, "scales": scales})
    is_of_blocks = blocks.dtype == torch.uint8 and blocks.dim() > 2 and blocks.shape[-1] == MX_DEPTH // 2
    if not is_of_blocks or scales.dtype not in EXPONENTS or scales.shape != blocks.shape[:-1] or not blocks.numel():
        raise InputError(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}, scales {scales.dtype} {tuple(scales.shape)}; they are "
            "uint8 [..., N, K / 32, 16] and e8m0 [..., N, K / 32]"
        )
    scales = scales.contiguous()
    if bool((scales.view(torch.uint8) == E8M0_NAN).any()):
        raise InputError("scales hold NaN")
    return _ordered(blocks.flatten(-2).contiguous(), scales, torch.bfloat16, order)


def pack_nvfp4(
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: Tensor,
    *,
    checkpoint_format: str = "modelopt",
    order: str = PLAIN,
) -> PackedWeight:
    """Return a weight of nvfp4 as `linear_w4` takes it, with one factor in bfloat16 for each 16 numbers along K.

    Args:
        weight: bytes [N, K / 2], each of two numbers e2m1, the earlier one in the low half.
        weight_scale: [N, K / 16] of ``torch.float8_e4m3fn``.
        global_scale: a float32 for all of them, ``weight_scale_2`` of modelopt, ``weight_global_scale`` of
            compressed-tensors.
        checkpoint_format: ``modelopt``, whose factors are multiplied by it, or ``compressed-tensors``, divided by it.
        order: as of `linear_w4`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: what does not belong together, or a factor that is NaN or infinite.

    Examples:
        >>> weight, scale = torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 16).to(torch.float8_e4m3fn)
        >>> tritongemm.pack_nvfp4(weight, scale, torch.tensor(0.5)).scale.shape
        torch.Size([16, 64])
    """
    check_tensors({"weight": weight, "weight_scale": weight_scale, "global_scale": global_scale})
    if checkpoint_format not in _MULTIPLIES:
        raise InputError(f"checkpoint_format is {checkpoint_format!r}; there are: {', '.join(_MULTIPLIES)}")
    is_weight = weight.dtype == torch.uint8 and weight.dim() == 2 and weight.numel() > 0
    groups = (weight.shape[0], 2 * weight.shape[1] // NV_DEPTH) if is_weight else ()
    if not is_weight or 2 * weight.shape[1] % NV_DEPTH or tuple(weight_scale.shape) != groups:
        raise InputError(
            f"weight is {weight.dtype} {tuple(weight.shape)}, weight_scale {tuple(weight_scale.shape)}; they are uint8 "
            f"[N, K / 2] and [N, K / {NV_DEPTH}]"
        )
    if weight_scale.dtype != torch.float8_e4m3fn or global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise InputError(
            f"weight_scale is {weight_scale.dtype}, global_scale {global_scale.dtype} {tuple(global_scale.shape)}; "
            "they are float8_e4m3fn, in rows, and one float32: split layers that are stored as one"
        )
    second = global_scale.detach().reshape(())
    factors = weight_scale.detach().float().t() * (second if _MULTIPLIES[checkpoint_format] else second.reciprocal())
    factors = factors.bfloat16().contiguous()
    if not bool(factors.isfinite().all()):
        raise InputError("weight_scale by global_scale holds NaN or infinity, as torch.bfloat16")
    return _ordered(weight.detach().contiguous(), factors, torch.bfloat16, order)


def depth_of(group: int) -> int:
    """Return the length along K of the longest groups that kernels have and that divide those of a weight, or 0."""
    return next((depth for depth in reversed(WEIGHT_DEPTHS) if group and group % depth == 0), 0)


def _packed(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype | None, order: str
) -> PackedWeight:
    """Return bytes [..., N, K / 2] with factors and zero points [..., K / group, N], copied where longer groups have
    one.
    """
    group = 2 * weight.shape[-1] // scales.shape[-2]
    depth = depth_of(group)
    if not depth:
        raise InputError(f"groups of {group} along K have no kernels; there are multiples of {min(WEIGHT_DEPTHS)}")
    wanted = dtype or (scales.dtype if scales.dtype in ACTIVATIONS else torch.bfloat16)
    if wanted not in ACTIVATIONS:
        raise InputError(f"dtype is {wanted}; activations beside four bits are bfloat16 or float16")
    scales = scales.detach().to(wanted)
    if not bool(scales.isfinite().all()):
        raise InputError(f"the scale factors hold NaN or infinity, as {wanted}")
    if zeros is not None and bool((zeros != INT4_ZERO).any()):
        scales = torch.stack((scales, zeros.to(wanted) - INT4_ZERO), -2)
    return _ordered(weight, scales.repeat_interleave(group // depth, weight.dim() - 2).contiguous(), wanted, order)


def _ordered(weight: Tensor, scales: Tensor, dtype: torch.dtype, order: str) -> PackedWeight:
    first = (0,) * (weight.dim() - 2)  # of experts, which are alike
    read_weight(weight[first], scales[first], dtype, order)
    rows = weight.flatten(0, -2)
    if order != PLAIN:
        rows = registry.get(WeightLayout, order).pack(rows.t()).t()
    return PackedWeight(rows.contiguous().view(weight.shape), scales, order)


def _numbers(words: Tensor) -> Tensor:
    """Return the numbers [..., 8] of int32 words, those of the low bits first."""
    packed = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _check_words(name: str, words: Tensor, extents: str, dimensions: tuple[int, ...] = (2, 3)) -> None:
    check_tensors({name: words})
    if words.dtype != torch.int32 or words.dim() not in dimensions or not words.numel():
        raise InputError(f"{name} is {words.dtype} {tuple(words.shape)}; it is int32 {extents}, eight numbers each")


def _check_scales(name: str, scales: Tensor, sizes: tuple[int, ...], turned: bool = False) -> None:
    check_tensors({name: scales})
    *experts, k, n = sizes
    groups = scales.shape[-2] if scales.dim() == len(sizes) else 0
    fits = groups and (*scales.shape[:-2], scales.shape[-1]) == (*experts, n)
    if not fits or k % groups or not scales.is_floating_point():
        wanted = f"[{''.join(f'{each}, ' for each in experts)}{f'N={n}, groups' if turned else f'groups, N={n}'}]"
        found = tuple((scales.mT if turned and scales.dim() > 1 else scales).shape)
        raise InputError(f"{name} is {scales.dtype} {found}; it is of floats {wanted}, whose groups divide K={k}")


def _check_groups(name: str, g_idx: Tensor, k: int, groups: int, option: str) -> None:
    """Refuse numbers along K whose groups are not equally many neighbours; `option` is what makes a quantiser do so."""
    check_tensors({name: g_idx})
    if tuple(g_idx.shape) != (k,) or not torch.equal(
        g_idx.long(), torch.arange(k, device=g_idx.device) // (k // groups)
    ):
        raise InputError(
            f"{name} has groups in another order ({option}): kernels read groups of neighbours along K; quantise "
            f"without {option}, or sort K of the weight and of what gives x"
        )


def _zero_points(name: str, zeros: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the zero points [..., 8] of int32 words."""
    _check_words(name, zeros, f"{list(shape)}")
    if tuple(zeros.shape) != shape:
        raise InputError(f"{name} is {tuple(zeros.shape)}; beside these scales it is {shape}")
    return _numbers(zeros)


def _in_range(name: str, zeros: Tensor) -> Tensor:
    """Return zero points, of which each is a number that a weight may have."""
    if (most := int(zeros.max())) > _LAST:
        raise InputError(f"{name} has the zero point {most}; a number of four bits has one from 0 to {_LAST}")
    return zeros
