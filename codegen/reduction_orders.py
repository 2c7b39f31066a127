"""States the reduction order of generated kernels, from the facts of their templates and of the target.

Measured on an H200 for operands of 16 bits: whatever tiles, warps and pipeline they have, and whether mma or wgmma
multiplies, kernels add the products of a run of K in the same order. Of other types the two kinds of instructions are
kept apart, and on devices whose instructions differ in how deep they are, so is whatever chooses one.
"""

from __future__ import annotations

from tritongemm.codegen.fact_sections import PAIRWISE
from tritongemm.codegen.geometry import evaluate
from tritongemm.codegen.render import accumulator, common_type
from tritongemm.codegen.template_facts import WARPS_OF_A_GROUP, adds_blocks, columns_at_once, kernel_template
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.reduction_order import EXACT, PAIRS, ReductionOrder
from tritongemm.core.support import Support
from tritongemm.core.target import Target

_WGMMA_ROWS = 64  # of a block whose products Triton makes by wgmma, in programs of 4 warps or a multiple
_DEEPEST = 128  # elements along K of the deepest matrix instruction: shallower blocks may be made by another one


def reduction_order(config: Config, problem: Problem, target: Target) -> ReductionOrder | Support:
    """Return the order in which a config's kernel adds up the products of an element of C, the same at every M.

    Returns:
        Why it can't be stated, where the place of an element in its tile, or M, decides how its K is cut.
    """
    if accumulator(problem).is_integer:
        return EXACT
    template = kernel_template(config.template)
    run = evaluate(template.order.run, config, problem, target.compute_units)
    if not run:
        return Support(f"where {config.template} cuts K depends on M, or on the place of an element in its tile")
    sums = PAIRS if config.option(PAIRWISE) else ""
    if evaluate(template.order.by_columns, config, problem, target.compute_units):
        sums = f"in tiles of {config.block_n} columns"
    block = _block(config, problem, target, template.order.long_block)
    return ReductionOrder(problem.k, min(run, problem.k), block, _unit(config, problem, target), sums)


def _block(config: Config, problem: Problem, target: Target, long_block: int) -> int:
    """Return the elements of K whose sum is one by itself within a run; 0 where there are no such blocks."""
    if not kernel_template(config.template).search.matrix:
        return 0
    if problem.scale_depth:
        return config.block_k
    return (long_block or config.block_k) if adds_blocks(problem, target) else 0


def _unit(config: Config, problem: Problem, target: Target) -> str:
    """Return what adds up the products of a run, where the target has several that round differently; else ""."""
    template = kernel_template(config.template)
    if not template.search.matrix:  # each thread adds its own, then the threads' sums are added
        at_once = f" {template.order.unit}" if template.order.unit else ""
        return f"threads {config.block_m}x{config.block_n}x{config.block_k} of {config.num_warps} warps{at_once}"
    operand = common_type(problem.a.type, problem.b.type)
    if operand.is_integer:  # each block's sum is exact
        return ""
    if target.has("matrix_instr_nonkdim"):
        side, pack = config.option("matrix_instr_nonkdim"), config.option("kpack", 1)
        chosen = f"{side}" if side else f"{config.block_m}x{config.block_n} of {config.num_warps} warps"
        depth = f" k{config.block_k}" if config.block_k < _DEEPEST else ""
        return f"mfma {chosen} pack {pack}{depth}"
    if target.has("two_fp8_depths"):
        return f"wmma k{min(max(config.block_k, _DEEPEST // 2), _DEEPEST)}" if operand.is_fp8 else ""
    as_16_bits = problem.microscaled and not target.has("scaled_matrix")
    alike = (operand.bytes == 2 or as_16_bits) and target.has("wgmma")
    if alike or not (target.has("wgmma") or target.has("tensor_memory")):
        return ""
    if template.order.unit:
        return template.order.unit
    swapped = template.value(config, "swap_ab", columns_at_once(problem)) if "swap_ab" in template.constexprs else 0
    rows = config.block_n if swapped else config.block_m
    wide = rows % _WGMMA_ROWS == 0 and config.num_warps % WARPS_OF_A_GROUP == 0
    return ("wgmma" if target.has("wgmma") else "tcgen05") if wide else "mma"
