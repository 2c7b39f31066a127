from dataclasses import replace
from pathlib import Path

import torch

from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import FRAGMENTS, FRAGMENTS_OF_GROUPS, GFX942, SM90
from tests.support.lent_processes import LentProcess
from tests.support.nouns import Config, Family, Groups, Target, WeightLayout, apart, heavy, refuses, registry, space
from tritongemm.codegen import modules
from tritongemm.codegen.geometry import unmet_need
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.search.pruning.prune import prune

FAMILY = registry.get(Family, "a16w4")
PLAIN = Problem(19, 40, 384, *matrices("bf16", "int4", "bf16", layout="TN"))
INT4 = FAMILY.problem(PLAIN)
ZEROS = FAMILY.problem(PLAIN, "weight_128_zeros")
FP4 = FAMILY.problem(replace(PLAIN, b=PLAIN.b._replace(dtype="fp4e2m1")))
NVFP4 = FAMILY.problem(replace(FP4, k=400, b=FP4.b._replace(scaling=None)), "weight_16")
GROUPS = Groups(4, 0, "captured", (5, 0, 11, 3))
IN_GROUPS = replace(ZEROS, groups=GROUPS)
FP8 = registry.get(Family, "a8w4")
MX = replace(PLAIN, a=Operand("fp8e4m3fn"), b=PLAIN.b._replace(dtype="fp4e2m1"))
BY_INT4 = replace(PLAIN, a=Operand("int8"))
MASKED = replace(FP8.problem(MX, "block_weight_mx"), groups=replace(GROUPS, room=11))
IN_FRAGMENTS = replace(INT4, n=48, b=INT4.b._replace(order="fragments"))
FP16 = replace(PLAIN, a=Operand("fp16"), c=Operand("fp16"))
# A block of K smaller than a scale's, as long, and of several; splits, swapped operands, sums that are polled for.
CONFIGS = (
    Config("tile", 16, 16, 64, split_k=2),
    Config("tile", 32, 16, 128, options=(("swap_ab", 1),)),
    Config("tile", 16, 32, 256, 2, 2, options=(("poll", 1), ("swap_ab", 1))),
)
OF_GROUPS = (
    Config("grouped", 16, 16, 64, options=(("swap_ab", 1),)),
    Config("grouped", 16, 32, 128),
    Config("grouped_tile", 16, 32, 256),
)


def in_order(problem: Problem, order: str) -> Problem:
    return replace(problem, b=problem.b._replace(order=order))


@apart(
    (INT4, SM90),
    heavy(in_order(INT4, "halves_128"), GFX942),
    heavy(FAMILY.problem(FP16, "weight_64_fp16"), SM90),
    (replace(in_order(FAMILY.problem(PLAIN, "weight_32"), "halves_32"), bias="n"), SM90),
    (in_order(ZEROS, "halves_128"), SM90),
    (FP4, SM90),
    (NVFP4, SM90),
    (replace(NVFP4, groups=replace(GROUPS, room=11)), GFX942),
    (replace(in_order(NVFP4, "fragments"), n=48, k=384), SM90),
    (FP8.problem(MX), GFX942),
    (FP8.problem(BY_INT4, "row_weight_64_zeros"), SM90),
    (replace(in_order(FP8.problem(BY_INT4, "row_weight_128"), "fragments"), n=48), SM90),
    (replace(in_order(FP8.problem(MX, "row_weight_mx"), "fragments"), n=48, groups=GROUPS), SM90),
    (in_order(IN_GROUPS, "halves_128"), GFX942),
    (MASKED, GFX942),
    heavy(replace(FP8.problem(MX, "mx"), groups=GROUPS), SM90),
    heavy(FP8.problem(MX, "block_rows_weight_mx"), SM90),
    heavy(replace(FP4, groups=GROUPS), SM90),
    (replace(IN_FRAGMENTS, bias="n"), SM90),
    (replace(in_order(ZEROS, "fragments"), n=48), SM90),
    (replace(in_order(IN_GROUPS, "fragments"), n=48), SM90),
    (replace(in_order(FP4, "fragments"), n=48, groups=replace(GROUPS, room=11)), SM90),
    (replace(in_order(FAMILY.problem(FP16, "weight_64_zeros_fp16"), "fragments"), n=48), SM90),
    heavy(replace(in_order(FAMILY.problem(PLAIN, "weight_32"), "fragments"), n=48, batch=2), SM90),
    (replace(in_order(FP4, "fragments"), n=48), SM90),
    heavy(replace(in_order(FP4, "halves_32"), batch=1), GFX942),
    heavy(replace(INT4, batch=3, a=INT4.a._replace(row_major=False)), GFX942),
    ids=lambda case: case.key if isinstance(case, Problem) else case.name,
)
def test_kernels_are_right(problem: Problem, target: Target, /, interpreted: Interpreted) -> None:
    of_groups, others = (FRAGMENTS_OF_GROUPS, FRAGMENTS) if problem.b.order == "fragments" else (OF_GROUPS, CONFIGS)
    configs = of_groups if problem.groups else others
    fitting = [config for config in configs if unmet_need(config, problem, 132) is None]
    found = interpreted.errors(problem, fitting, target)
    assert len(found) >= 2 and max(found.values()) <= 1, found


@apart(
    ("b_low, b_high = b.to", "b_high, b_low = b.to", 0, INT4),
    ("- 136.0", "- 135.0", 0, INT4),
    ("tl.minimum(k + 1, blocks - 1)", "tl.minimum(k, blocks - 1)", 1, INT4),
    ("g = k * (BLOCK_K // 128)", "g = 0 * (BLOCK_K // 128)", 2, INT4),
    ("(tl.minimum(k + 1, blocks - 1) * BLOCK_K // 128).to(tl.int64) * N * 2 + N", "N", 1, ZEROS),
    ("zeros = tl.load(of_b_at + N)", "zeros = tl.load(of_b_at)", 2, ZEROS),
    ("* (BLOCK_K // 16) + tl", "* (BLOCK_K // 16) + 1 + tl", 0, NVFP4),
    ("tl.join(q0, q2)", "tl.join(q0, q1)", 0, IN_FRAGMENTS),
    (", None] * SLICE", ", None] * (SLICE // 2)", 1, IN_FRAGMENTS),
    ids=["swapped halves", "another zero", "factors of the block before", "the first factors", "the first zero points",
             "factors as zero points", "factors of the next 16", "numbers of a word", "factors of another warp"],
)  # fmt: skip
def test_wrong_kernels_are_noticed(
    old: str, new: str, config: int, problem: Problem, /, interpreter: LentProcess, tmp_path: Path
) -> None:
    chosen = (FRAGMENTS if problem == IN_FRAGMENTS else CONFIGS)[config]
    text = modules.write_candidates(
        problem, [chosen], SM90 if problem == IN_FRAGMENTS else GFX942, tmp_path
    ).read_text()
    assert old in text
    ((error, tolerance),) = interpreter.ask(InterpreterJob(problem, chosen, text.replace(old, new)), 60)
    assert error > tolerance


def test_numbers_of_the_halves_of_a_span_share_a_byte() -> None:
    order = registry.get(WeightLayout, "halves_32")
    numbers = torch.arange(32) % 16  # of one column
    stored = order.pack((numbers[::2] | numbers[1::2] << 4).to(torch.uint8)[:, None])[:, 0]
    assert stored.tolist() == [int(numbers[k] | numbers[k + 16] << 4) for k in range(16)]


def test_fragments_are_what_threads_give_a_matrix_instruction() -> None:
    """PTX ISA, mma.m16n8k16: thread 4 * g + t has rows g and g + 8, and 2 * t, 2 * t + 1 and those 8 further of K."""
    numbers = torch.randint(0, 16, (32, 128))
    stored = registry.get(WeightLayout, "fragments").pack((numbers[:, ::2] | numbers[:, 1::2] << 4).byte().mT).mT
    words = (
        stored.contiguous().view(torch.int16).reshape(2, 2, 32, 4, 2)
    )  # blocks of columns, of K; threads, registers, pairs
    for n, k, thread, register, pair, place in (
        (0, 0, 0, 0, 0, 0),
        (1, 1, 7, 1, 1, 2),
        (0, 1, 31, 2, 0, 3),
        (1, 0, 13, 3, 1, 1),
    ):
        g, t = thread // 4, thread % 4
        number = numbers[n * 16 + register % 2 * 8 + g, k * 64 + place * 16 + register // 2 * 8 + t * 2 + pair]
        assert words[n, k, thread, register, pair] >> 4 * place & 15 == number


def test_what_it_is_for() -> None:
    assert [axes.template for axes in space(INT4, SM90).axes] == ["tile"]
    for m, templates in ((19, ["fragments"]), (256, ["fragments", "ws_fragments"])):
        assert [axes.template for axes in space(replace(IN_FRAGMENTS, m=m), SM90).axes] == templates
    for k, slices in ((8192, {128}), (128, {64})):
        few = replace(IN_FRAGMENTS, m=1, n=2560, k=k)
        kept = prune(space(few, SM90), few, SM90).kept
        assert {config.block_k // config.option("slices", 1) for config in kept} == slices
    for count, n, k, turns in ((384, 7168, 256, {1, 4, 8, 16}), (8, 512, 256, {1}), (384, 512, 7168, {1})):
        experts = replace(IN_FRAGMENTS, m=512, n=n, k=k, groups=Groups(count))
        assert {config.option("turns", 1) for config in prune(space(experts, SM90), experts, SM90).kept} == turns
    assert INT4.bytes == 19 * 384 * 2 + 40 * 192 + 40 * 3 * 2 + 19 * 40 * 2
    for problem, reason in (
        (replace(INT4, b=INT4.b._replace(row_major=True)), "column-major"),
        (replace(INT4, k=320), "K a multiple of 128: each 128 numbers"),
        (replace(INT4, c=Operand("int32")), "bf16, fp16 or fp32, not int32"),
        (replace(FP4, a=Operand("fp16")), "fp4 by bf16"),
        (in_order(NVFP4, "halves_32"), "multiples of 32"),
        (replace(NVFP4, k=392), "K a multiple of 16: each 16 numbers"),
        (in_order(replace(FP4, k=352), "halves_128"), "multiples of 128"),
        (replace(IN_FRAGMENTS, n=40), "N a multiple of 16"),
    ):
        assert reason in FAMILY.supports(problem, SM90).reason
    refuses("no scales of the granularity 'weight_16'", FAMILY.problem, PLAIN, "weight_16")
