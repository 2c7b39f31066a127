"""The check of a kernel on a machine without a GPU: launches in Triton's interpreter, on a reduced problem."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

from tritongemm.codegen import modules
from tritongemm.codegen.geometry import geometry
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.measure.guarded_operands import guarded
from tritongemm.numerics import epilogues, float32_check
from tritongemm.numerics.grouped import written
from tritongemm.numerics.verify import poison
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.search.cost_model.waves import count_tiles

_COLUMNS = (1, 16, 32, 64, 128, 256)


def reduced(problem: Problem, config: Config) -> Problem:
    """Return a smaller problem with the same remainders, and with at least two of whatever the original has several.

    It has two tiles along M and N (three where the other has one) plus the remainder, and more columns than share a
    scale factor. Along K the number of blocks leaves the original's remainder when it is split, or added up in runs:
    each part has two, or there are three, and more than share a factor. A batch has three products. The number of
    groups stays, and rows are spread as in the original; captured spreads as skewed ones.
    """

    def shrink(size: int, block: int, blocks: int) -> int:
        return min(size, blocks * block + size % block)

    shared = problem.b.scaling.rows if problem.b.scaling else 0
    tiles_m = 3 if problem.n <= config.block_n else 2
    tiles_n = max(3 if problem.m <= config.block_m else 2, cdiv(shared + 1, config.block_n) if shared > 1 else 0)
    m, groups = shrink(problem.m, config.block_m, tiles_m), problem.groups
    if groups:
        room = shrink(groups.room, config.block_m, tiles_m)
        spread = "skewed" if groups.counts else groups.spread
        m, groups = min(m, room or m), replace(groups, room=room, spread=spread, counts=())
    blocks = cdiv(problem.k, config.block_k)
    depth = max((s.depth for s in problem.scalings if s), default=0)
    parts = config.split_k * config.option("runs", 1)
    least = max(2 * parts if parts > 1 else 3, cdiv(depth + 1, config.block_k))
    kept = min(blocks, least + (blocks - least) % parts)
    k, batch = problem.k - (blocks - kept) * config.block_k, min(problem.batch, 3)
    n = shrink(problem.n, config.block_n, tiles_n)
    family = registry.get(Family, problem.family)
    # Some epilogues and orders of B want a multiple of a number of columns.
    possible = (replace(problem, m=m, n=round_up(n, step), k=k, batch=batch, groups=groups) for step in _COLUMNS)
    return next(filter(family.computes, possible), replace(problem, m=m, k=k, batch=batch, groups=groups))


def with_fewer_programs(config: Config, problem: Problem, small: Problem, target: Target) -> tuple[Config, Target]:
    """Return the config and the target with fewer programs, if the target's compute units limit their number.

    Of the reduced problem there are then more tiles than programs too, or fewer, as of the original.
    """
    most = config.option("num_sms") or config.option("per_unit", 1) * target.compute_units
    grids = [geometry(config, problem, units).grid for units in (1, target.compute_units)]
    if grids[0] == grids[1] and not config.option("num_sms"):
        return config, target
    tiles, few_tiles = count_tiles(config, problem), count_tiles(config, small)
    if tiles > most:
        alike = (n for n in range(2, few_tiles) if (few_tiles % n == 0) is (tiles % most == 0))
        programs = next(alike, max(1, few_tiles - 1))
    elif small.groups:  # those have more tiles than these
        return config, target
    else:
        programs = few_tiles + 1
    options = tuple((name, programs if name == "num_sms" else value) for name, value in config.options)
    units = max(1, programs // config.option("per_unit", 1))
    return replace(config, options=options), replace(target, compute_units=units)


def count_launches(config: Config, problem: Problem) -> int:
    """Return the launches of a check: two where one leaves counters or a workspace behind for the next, else one.

    Two of groups also, as a tile that reaches into the next group's rows is found by the opposite order alone.
    """
    sizes = geometry(config, problem, 1)
    return 2 if sizes.workspace_bytes or sizes.semaphore_bytes or problem.groups else 1


@dataclass(frozen=True)
class InterpreterJob:
    """A request to check a config's kernel in the interpreter, from the text of a generated module."""

    problem: Problem
    config: Config
    text: str


class Interpreter:
    """The request handler of the interpreter's process."""

    def __init__(self) -> None:
        import torch  # Imported here, so that a slow import counts as starting.
        import triton

        self._torch, self._triton = torch, triton
        mend_interpreter()

    def __call__(self, job: InterpreterJob) -> Iterator[tuple[float, float]]:
        """Yield once: the largest error of its launches, and the largest error that rounding in float32 causes.

        In the last launch some operands are not finite. A second one runs the programs in the opposite order, on the
        workspace and the counters that the first has left; counters that are not zero count as an infinite error.
        """
        module = modules.run_text(job.text, "generated")
        memory = _scratch_memory(module)
        problem, family = job.problem, registry.get(Family, job.problem.family)
        operands = {name: guarded(t) for name, t in family.make_inputs(problem, "cpu").items()}
        # The interpreter truncates where hardware rounds to nearest: floats stay float32.
        dtype = getattr(self._torch, problem.c.type.torch) if problem.c.type.is_integer else self._torch.float32
        c = guarded(self._torch.empty(problem.operands["c"].extents, dtype=dtype))
        # A program that waits for others waits for those that were started before it.
        waits = module.config(job.config.name)[3].get("POLL") == 1
        float32_check.enlarge(problem, operands)
        errors, launches = [], count_launches(job.config, problem)
        for launch in range(launches):
            if launch == launches - 1:
                float32_check.make_infinite(problem, operands)
            for buffer in (c, *(partial for partial, _ in memory)):
                poison(buffer)
            with _order_of_programs(backwards=launch > 0 and not waits):
                module.launch(job.config.name, c=c, **operands)
            exact = family.reference(problem, operands)
            magnitude, _ = written(problem, float32_check.magnitudes(problem, family, operands), exact)
            errors.append(float32_check.deviation(*written(problem, epilogues.numbers(problem, c), exact), magnitude))
            errors += [float32_check.deviation_of_factors(problem, c)] if problem.in_blocks else []
            errors += [float("inf") for _, counters in memory if counters.any()]
        yield max(errors), float32_check.tolerance(problem)


def _scratch_memory(module: ModuleType) -> list[tuple[Any, Any]]:
    """Return the workspace and the counters that launches of a generated module share from now on, once they exist.

    Nothing may be read behind them, as behind operands, and the workspace is poisoned.
    """
    plain = vars(module).setdefault("plain_scratch", module.scratch)
    made: list[tuple[Any, Any]] = []

    def scratch(*sizes: Any) -> tuple[Any, Any]:
        if not made:
            partial, counters = map(guarded, plain.__wrapped__(*sizes))
            poison(partial)
            made.append((partial, counters))
        return made[0]

    vars(module)["scratch"] = scratch
    return made


@cache
def mend_interpreter() -> None:
    """Have the interpreter of Triton 3.6 run what those of later versions do."""
    from triton.runtime import interpreter

    patch, core = interpreter._patch_lang_tensor, interpreter._patch_lang_core

    def patch_tensor(tensor: Any, scope: Any) -> None:  # it takes arrays of one element for numbers; numpy 2.4 does not
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def refuse_powers(*_: Any, **__: Any) -> None:
        raise RuntimeError("this Triton's interpreter can't multiply by powers of two along K; take a later one")

    def patch_core(lang: Any, scope: Any) -> None:  # it does not know AMD's own fp8
        core(lang, scope)
        if "create_dot_scaled" not in vars(interpreter.InterpreterBuilder):
            scope.set_attr(lang, "dot_scaled", refuse_powers)
        known, amd = lang.dtype.to_ir, {"fp8e4b8": "get_fp8e4b8_ty", "fp8e5b16": "get_fp8e5b16_ty"}
        scope.set_attr(lang.dtype, "to_ir", lambda t, b: getattr(b, amd[t.name])() if t.name in amd else known(t, b))

    interpreter._patch_lang_tensor, interpreter._patch_lang_core = patch_tensor, patch_core


@contextmanager
def _order_of_programs(backwards: bool) -> Iterator[None]:
    """Have the interpreter run programs in their order, or from the last to the first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    start = builder.set_grid_idx

    def set_from_the_end(*place: int) -> None:
        start(*(extent - 1 - index for extent, index in zip(builder.grid_dim, place, strict=True)))

    builder.set_grid_idx = set_from_the_end if backwards else start
    try:
        yield
    finally:
        del builder.set_grid_idx
