"""The grid, workspace bytes and compile-time constants of one launch of a config."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

from tritongemm.codegen import template_facts
from tritongemm.core.config import LAUNCHED, Config
from tritongemm.core.epilogues import RUN
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import SCALED_BLOCK

Need = Callable[[Config, Problem, int], "str | None"]
LARGEST_INDEX = 2**31 - 1  # kernels count rows, columns, tiles and offsets inside a tile in 32 bits
MX_INSTRUCTION_DEPTH = 128  # elements along K of the widest matrix instruction that applies powers of two


@dataclass(frozen=True)
class Geometry:
    """The sizes of one launch of a config: grid, workspace and counter bytes, tensor map blocks."""

    grid: tuple[int, int, int]
    workspace_bytes: int
    semaphore_bytes: int
    descriptors: dict[str, tuple[int, int]]


def batch_strides(problem: Problem) -> tuple[str, ...]:
    """Return the stride parameters of a batched kernel, in elements per product; 0 for a shared operand."""
    if problem.kind != "batched":
        return ()
    return tuple(f"batch_{name}" for name in ("a", "b", "c", *(e.name for e in problem.extras)))


def constants(config: Config, problem: Problem) -> dict[str, Any]:
    """Return the compile-time constants of a config's kernel, by parameter name."""
    return {
        "CONFIG": config.kernel_name,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "EVEN_K": problem.k % config.block_k == 0,
        **template_facts.kernel_template(config.template).constants(config, template_facts.columns_at_once(problem)),
        **{option.upper(): 0 for option, _ in config.options if option in LAUNCHED},
    }


def geometry(config: Config, problem: Problem, compute_units: int) -> Geometry:
    """Return the grid and workspace of one launch."""
    template, scope = template_facts.kernel_template(config.template), _Scope(config, problem, compute_units)
    value = scope.evaluate

    row_major = {"a": problem.a.row_major, "b": problem.b.row_major, "c": True}
    packed = {name: problem.operands[name].dtype.packed for name in row_major}
    x, y, z = (value(g) for g in template.grid)
    products = problem.batch  # each has its own programs, along z, and its own partial sums
    return Geometry(
        grid=(x, y, z * products),
        workspace_bytes=4 * products * value(template.workspace),
        semaphore_bytes=4 * products * value(template.semaphores),
        descriptors={
            k: template_facts.stored_block(
                (value(r), value(c) // (problem.fold if template_facts.operand_of(k) == "c" else 1)),
                row_major[template_facts.operand_of(k)],
                packed[template_facts.operand_of(k)],
            )
            for k, (r, c) in template.descriptors.items()
        },
    )


def _depth_of_scales(config: Config, problem: Problem) -> int:
    """Return the number of elements along K that share a scale; a block of K where no scale changes along K."""
    in_blocks = problem.microscaled or template_facts.has_four_bit_weight(problem)
    depths = [] if in_blocks else [e.scaling.depth for e in problem.extras if e.scaling]
    return gcd(*depths) or config.block_k


# The names that a template's expressions may use beside its constexprs.
_NAMES: dict[str, Callable[[Config, Problem], Any]] = {
    "BLOCK_M": lambda config, problem: config.block_m,
    "BLOCK_N": lambda config, problem: config.block_n,
    "BLOCK_K": lambda config, problem: config.block_k,
    "SPLIT_K": lambda config, problem: config.split_k,
    "GROUP_M": lambda config, problem: config.group_m,
    "EVEN_K": lambda config, problem: problem.k % config.block_k == 0,
    "M": lambda config, problem: problem.group_m,
    "N": lambda config, problem: problem.n,
    "K": lambda config, problem: problem.k,
    "GROUPS": lambda config, problem: problem.group_count,
    "MASKED": lambda config, problem: problem.masked,
    "ROW_MAJOR_B": lambda config, problem: problem.b.row_major,
    "DEPTH": _depth_of_scales,
    "INTEGERS": lambda config, problem: problem.a.type.is_integer,
    "SCALED_N": lambda config, problem: problem.b.scaling.rows if problem.b.scaling and problem.scale_depth else 1,
    "SCALE_DEPTH": lambda config, problem: problem.scale_depth,
    "LONG_SUM": lambda config, problem: problem.a.type.is_fp8 and problem.k > template_facts.LONG_FP8_SUM,
}


class _Scope(dict[str, Any]):
    """Values of the names in an expression, computed on use: a search evaluates it for thousands of configs, and
    one answer is for all that agree in what was read.
    """

    def __init__(self, config: Config, problem: Problem, compute_units: int) -> None:
        super().__init__(COMPUTE_UNITS=compute_units, cdiv=lambda a, b: -(-a // b), min=min, max=max)
        self._config, self._problem = config, problem

    def __missing__(self, name: str) -> Any:
        config, problem, template = self._config, self._problem, template_facts.kernel_template(self._config.template)
        if name in _NAMES:
            value = _NAMES[name](config, problem)
        elif (option := name.lower()) in template.constexprs:
            value = template.value(config, option, template_facts.columns_at_once(problem))
        else:
            raise KeyError(name)
        self[name] = value
        return value

    def evaluate(self, expression: str) -> int:
        """Return the value of a template's expression."""
        return int(eval(template_facts._code(expression), {"__builtins__": {}}, self))


def evaluate(expression: str, config: Config, problem: Problem, compute_units: int) -> int:
    """Return the value of an expression of a template's facts for one launch of a config."""
    return _Scope(config, problem, compute_units).evaluate(expression)


def unmet_need(config: Config, problem: Problem, compute_units: int) -> str | None:
    """Return the first of its template's needs that a config does not meet, as a sentence, or None."""
    answers = (need(config, problem, compute_units) for need in list_needs(config.template))
    return next((words for words in answers if words is not None), None)


@cache
def list_needs(template: str) -> tuple[Need, ...]:
    """Return the needs of a template, each as a function that returns what a config does not meet.

    Each function reads few fields of a config, so that for the thousands of configs of a search most answers are
    memoised.
    """
    return (
        distant_rows,
        complete_runs,
        _complete_pieces,
        _complete_scales,
        *(_expression_need(words, holds) for words, holds in template_facts.kernel_template(template).needs.items()),
    )


def _expression_need(words: str, holds: str) -> Need:
    """Return the need that an expression of a template's facts states."""
    code = template_facts._code(holds)

    def unmet(config: Config, problem: Problem, compute_units: int) -> str | None:
        return None if eval(code, {"__builtins__": {}}, _Scope(config, problem, compute_units)) else words

    return unmet


def distant_rows(config: Config, problem: Problem, compute_units: int = 1) -> str | None:
    """Return why offsets inside a config's tile, which kernels add to its corner in 32 bits, need more; or None."""
    if max(*config.tile, problem.n if problem.groups else 0) * max(problem.leads) <= LARGEST_INDEX:
        return None
    template, (m, n, k) = template_facts.kernel_template(config.template), config.tile
    if problem.groups and problem.fold > 1:
        n = problem.n  # a tile's columns of up are half of them behind those of gate
    blocks = {"a": m if problem.a.row_major else k, "b": k if problem.b.row_major else n, "c": m}
    for (name, rows), lead in zip(blocks.items(), problem.leads, strict=True):
        # Pointers beside descriptors only bring first blocks into a cache.
        by_pointer = name not in template.descriptors or (name in template.pointers and config.option("ahead"))
        apart = lead // problem.operands[name].dtype.packed
        if by_pointer and rows > 1 and rows * apart > LARGEST_INDEX:
            return f"a tile has {rows} rows of {name.upper()} that begin {apart} elements apart: offsets beyond 32 bits"
    return None


def _complete_scales(config: Config, problem: Problem, compute_units: int) -> str | None:
    """Require that a block of K holds complete scales, or that a scale covers complete blocks."""
    matrix = template_facts.kernel_template(config.template).search.matrix
    if problem.microscaled and matrix and config.block_k % MX_INSTRUCTION_DEPTH:
        least = MX_INSTRUCTION_DEPTH
        return f"block_k must be a multiple of {least} where matrix units apply scales, not {config.block_k}"
    if problem.microscaled and config.block_k % problem.scale_depth:
        return f"block_k must be a multiple of the {problem.scale_depth} elements of one scale, not {config.block_k}"
    if config.block_k % max(1, span := 2 * template_facts.apart_in_bytes(problem)):
        return f"block_k must be a multiple of the {span} elements in whose bytes B's are, not {config.block_k}"
    of_a = problem.a.scaling
    if span and of_a and of_a.dtype == "fp32" and of_a.depth % config.block_k:
        return f"block_k must divide the {of_a.depth} elements along K of one scale of A, not {config.block_k}"
    complete = span and config.block_k % problem.scale_depth == 0
    if span and not complete and problem.b.dtype == "fp4e2m1":
        return f"block_k must be a multiple of the {problem.scale_depth} elements of one scale, not {config.block_k}"
    if complete:
        return None
    if matrix and not problem.microscaled and problem.scale_depth % config.block_k:
        return f"block_k must divide the {problem.scale_depth} elements along K of one scale, not {config.block_k}"
    return None


def complete_runs(config: Config, problem: Problem, compute_units: int) -> str | None:
    """Require that each part of a tile has as many columns of gate as of up, and stores complete runs."""
    # Pruning asks once for all that agree in what is read of a config: no more than decides, and that late.
    if problem.fold == 1 and not problem.in_blocks:
        return None
    template, at_once = template_facts.kernel_template(config.template), template_facts.columns_at_once(problem)

    def value(option: str, without: int = 0) -> int:
        return template.value(config, option, at_once) if option in template.constexprs else without

    along_n = not value("swap_ab") and not value("padded")
    last = value("tail") if along_n else 0
    if problem.in_blocks:
        wide = SCALED_BLOCK * problem.fold
        if not template.edited and config.block_n % wide == 0:
            return None
        exchanging = config.split_k if value("exchange") else 1
        if along_n and config.block_n == wide * exchanging and not last:
            return None
        return f"a tile must have {SCALED_BLOCK} columns of C, {wide} of B, for the factors of its rows"
    parts = (config.split_k if value("exchange") else value("epilogue_parts", 1)) if along_n else 1
    run = RUN if problem.groups else problem.run
    least, body = run * problem.fold, config.block_n - last
    if config.block_n % least == 0 and body % (least * parts) == 0:
        return None
    if run == RUN and not template.search.matrix and least % config.block_n == 0 and config.block_n > 1:
        return None  # a part of one run of gate and the same one of up
    return f"each of {parts} parts of {body} columns must have {run} of gate, as many of up, and so on"


def _complete_pieces(config: Config, problem: Problem, compute_units: int) -> str | None:
    """Require blocks of complete groups and pieces of a B whose columns are interleaved."""
    return split_piece(config, problem)


def batch_fault(config: Config, problem: Problem) -> str | None:
    """Return why descriptors would read a batch wrong: they fill with zeros only outside the entire batch."""
    described = set(map(template_facts.operand_of, template_facts.kernel_template(config.template).descriptors))
    rows = {"a": problem.m if problem.a.row_major else problem.k, "b": problem.k if problem.b.row_major else problem.n}
    along_k = {"a": not problem.a.row_major, "b": problem.b.row_major}
    for name in sorted(described & rows.keys()):
        batch = problem.operands[name].batch
        if batch * rows[name] > LARGEST_INDEX:
            return (
                f"the {batch * rows[name]} stored rows of a batch of {name.upper()} are beyond a descriptor's 32 bits"
            )
        if batch and along_k[name] and problem.k % config.block_k:
            return (
                f"{name.upper()} is stored by rows of K, and block_k {config.block_k} does not divide K {problem.k}: "
                "its last block would read the next product's rows into the sum"
            )
    return None


def split_piece(config: Config, problem: Problem) -> str | None:
    """Return why a config's blocks do not consist of complete groups and pieces of an interleaved B, or None."""
    pieces = template_facts.pieces_of_b(problem)
    if pieces is None:
        return None
    run = pieces.run * problem.b.type.packed
    if not (config.block_n % pieces.columns or config.block_k % run):
        return None
    wanted = f"{pieces.columns} columns and {run} elements along K"
    return (
        f"a B in the order {problem.b.order} is read in blocks of {wanted}, not {config.block_n} and {config.block_k}"
    )
