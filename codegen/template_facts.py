"""The kernel templates: each file of templates/kernels/ carries, in its first comment, the facts a launcher needs.

The facts are expressions over M, N, K, the config's constants and COMPUTE_UNITS. They are evaluated here and pasted
into generated modules, so a grid is written down once. A header may name, under ``names``, what they have in common.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from tritongemm.codegen.fact_sections import GRIDS, RULE_GROUPS, OrderFacts, SearchFacts, read_header
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.target import Target
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Pieces, WeightLayout

_UNKNOWN = SearchFacts()  # for a template that is not here
TEMPLATES = Path(__file__).parent / "templates"
HALVED_COLUMNS = 128  # more columns of a tile are two parts where `columns_at_once` says fewer than MOST_PADDED
# Columns of which there is room for the sum of a block of K beside that of all, in a group of warps with 64 rows.
SCALED_COLUMNS = 160
# Hopper's matrix units keep about 14 bits of a sum of fp8 products. Sums of more elements of K are of blocks that are
# added up in float32: without that, errors of K = 16384 were above the family's tolerance.
LONG_FP8_SUM = 8192
# Warps that issue a matrix instruction of Hopper together.
WARPS_OF_A_GROUP = 4
# Constants that follow from a config's tile and splits, and that it can't name.
DERIVED = {"tail", "padded", "exchange"}
# Columns of a tile that is in wider blocks: a matrix instruction has a multiple of 8, at most 256.
PADDED_STEP, MOST_PADDED = 8, 256
MOST_FEW_ROWS = 64  # rows of the largest tile of which fewer are fetched where A has fewer
# Bytes along K of a block whose rows, 8 at a time, may begin anywhere: their bytes are swizzled among themselves.
SWIZZLED_BYTES = 128
# Of tiles whose splits exchange sums: the numbers of splits; the most elements, for whose sums shared memory has room
# beside the ring; the fewest columns that each program adds up.
EXCHANGED_SPLITS, EXCHANGED_SUMS, EXCHANGED_COLUMNS = (2, 4), 128 * 128, 8
EXCHANGED_PADDED_SUMS = 128 * 192  # of padded tiles, which two splits exchange


@dataclass(frozen=True)
class KernelTemplate:
    """One kernel template."""

    name: str  # stem of its file, and of the function in it
    summary: str  # one line on what it does
    grid: tuple[str, ...]  # expressions of the three grid sizes
    search: SearchFacts  # what the search must know of it
    # Options of a config that are constants of the kernel; the others go to the compiler. One that names `tail` takes a
    # BLOCK_N of two powers of two, and is given the smaller. One that names `padded` takes other multiples of 16 too,
    # and is given the power of two that their columns are in. One that names `exchange` is given whether the splits of
    # a tile exchange sums through shared memory.
    constexprs: tuple[str, ...] = ()
    # Those of them that say how programs are launched; the search leaves them to its end.
    launch_options: tuple[str, ...] = ()
    defaults: Mapping[str, int] = field(default_factory=dict)  # value of such an option where a config does not name it
    # Expression of the consecutive programs that are launched as a cluster; 1 where the target has none.
    cluster: str = "1"
    workspace: str = "0"  # expression of the scratch elements (four bytes each, any contents)
    semaphores: str = "0"  # expression of the counters (four bytes each, zero before and after a launch)
    # TMA descriptors in the order of the operands they are of, with the expressions of their block's rows and columns;
    # an operand's name may be followed by `_tail` for another one of it.
    descriptors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pointers: tuple[str, ...] = ()  # operands that have descriptors and are passed as pointers too
    describe: str = "TensorDescriptor.from_tensor"  # function of the module that makes one, from a tensor and its block
    # Expressions of options that go to the compiler whatever the config says.
    compiler: Mapping[str, str] = field(default_factory=dict)
    interpreted: bool = True  # whether Triton's interpreter can run it, without a GPU
    # What must hold for its configs beside what holds for all: words, and the expression that says it.
    needs: Mapping[str, str] = field(default_factory=dict)
    # Of `Problem.kind` that it computes; the products of a batch are dealt out along the grid's z.
    kinds: tuple[str, ...] = ("one",)
    # Whether it reads a B whose columns are interleaved in pieces, as some orders of weights have them.
    pieces: bool = False
    # Whether it multiplies operands with powers of two along K (OCP MX); two numbers a byte too.
    microscaled: bool = False
    four_bits: bool = False  # whether it multiplies a weight of four bits by a wider A
    fragments: bool = False  # whether it multiplies such a weight only in the order `fragments`
    # Whether the assembly that Triton makes of it is edited at marks (backends/triton/assembly_edits.py).
    edited: bool = False
    # Block sizes, by their names in a config, of a kernel that is not edited, where the compiler takes no others.
    without_edits: Mapping[str, str] = field(default_factory=dict)
    order: OrderFacts = field(default_factory=OrderFacts)  # in which order it adds up products

    def value(self, config: Config, option: str, at_once: int = MOST_PADDED) -> int:
        """Return a config's value of one of `constexprs`: an option of its own, or one that every config has."""
        if option == "padded":
            return padded_columns(config, at_once)
        if option == "exchange":
            return int(exchanges_sums(config, at_once))
        if option == "tail":
            columns = self.columns(config)
            if padded_columns(config, at_once):
                return 0
            halved = at_once < MOST_PADDED and columns > HALVED_COLUMNS and not tail(columns)
            return columns // 2 if halved else tail(columns)
        if option in ("num_warps", "num_stages"):
            return int(getattr(config, option))
        return config.option(option, self.defaults.get(option, 0))

    def constants(self, config: Config, at_once: int = MOST_PADDED) -> dict[str, int]:
        """Return the values of all `constexprs` by the names that a kernel has for them, in capitals."""
        return {option.upper(): self.value(config, option, at_once) for option in self.constexprs}

    def columns(self, config: Config) -> int:
        """Return the columns of a config's tile that matrix instructions see."""
        swapped = config.option("swap_ab", self.defaults.get("swap_ab", 0))
        return config.block_m if swapped else config.block_n


def columns_at_once(problem: Problem) -> int:
    """Return the most columns of a tile of two powers of two that kernels whose warps have roles multiply at once.

    Below MOST_PADDED wide tiles are multiplied in halves too. Where scales change along K, the sum of a block of K
    needs registers beside the sum of all, unless they multiply a weight of four bits where it is widened. Triton knows
    no matrix instruction of integers with 256 columns.
    """
    scaled = problem.scale_depth > 0 and not has_four_bit_weight(problem)
    own_factors = scaled and (problem.b.scaling is None or problem.b.scaling.rows == 1)
    if problem.a.type.is_integer:
        return 0 if own_factors else HALVED_COLUMNS
    return MOST_PADDED if not scaled else 0 if own_factors else SCALED_COLUMNS


def adds_blocks(problem: Problem, target: Target) -> bool:
    """Return whether the sum over K is so long that blocks of it are added up in float32, outside the matrix units."""
    fp8 = problem.a.type.is_fp8 and problem.b.type.is_fp8
    return fp8 and target.has("wgmma") and problem.k > LONG_FP8_SUM and not problem.scale_depth


def tail(block: int) -> int:
    """Return the smallest of the powers of two that add up to a block; 0 where it is one."""
    return (block & -block) % block


@cache
def _has_constant(template: str, name: str) -> bool:
    """Return whether a kernel has a constant of this name; False for other backends' templates."""
    return template in names() and name in kernel_template(template).constexprs


def padded_columns(config: Config, at_once: int = MOST_PADDED) -> int:
    """Return the columns of the block, a power of two, of which matrix instructions take as many as a tile has.

    Returns:
        0 for a tile that is multiplied as wide as its blocks are, of any template, and for one of two powers of two
        that has more columns than are multiplied `at_once` (see `columns_at_once`).
    """
    if not _has_constant(config.template, "padded"):
        return 0
    template = kernel_template(config.template)
    columns, swapped = template.columns(config), template.value(config, "swap_ab") == 1
    united = columns <= at_once and (at_once == MOST_PADDED or not swapped)
    return 1 << columns.bit_length() if columns.bit_count() > (1 if united else 2) else 0


def columns_of_slot(config: Config, problem: Problem) -> int:
    """Return the columns of a tile, as matrix instructions see them, that a slot of the ring has room for."""
    template = kernel_template(config.template)
    columns, padded = template.columns(config), padded_columns(config, columns_at_once(problem))
    swapped = template.value(config, "swap_ab") == 1
    along_k = problem.a.row_major if swapped else not problem.b.row_major
    tight = along_k and config.block_k * problem.a.type.bytes == SWIZZLED_BYTES
    return padded if padded and not tight else columns


def fetches_few_rows(config: Config, problem: Problem) -> bool:
    """Return whether a kernel fetches only as many rows of A as there are, where a tile has more."""
    facts = kernel_template(config.template)
    split = facts.value(config, "swap_ab") == 1 and facts.value(config, "tail", columns_at_once(problem)) > 0
    plain = facts.edited and not facts.fragments and problem.a.row_major and problem.groups is None
    return plain and config.block_m <= MOST_FEW_ROWS and not split


def operands(problem: Problem) -> tuple[str, ...]:
    """Return the names of a kernel's operands, in order; every kernel has a place for a bias."""
    others = [e.name for e in problem.extras if e.name != "bias"]
    return ("a", "b", "c", *others, "bias", "workspace", "semaphore")


def exchanges_sums(config: Config, at_once: int = MOST_PADDED) -> bool:
    """Return whether the splits of a config's tile exchange their sums through the shared memory of a cluster.

    Each of its programs then adds up and stores an equal share of the tile's columns. The splits of tiles that are too
    large or in two parts, that are stored in parts, or whose programs are paired add their sums through L2.
    """
    if config.split_k not in EXCHANGED_SPLITS or not _has_constant(config.template, "exchange"):
        return False
    columns = kernel_template(config.template).columns(config)
    stored_complete = config.option("epilogue_parts", 1) == 1 and not config.option("pair")
    elements = config.block_m * config.block_n
    if padded_columns(config, at_once):
        alike = config.split_k == 2 and columns % (2 * PADDED_STEP) == 0
        return stored_complete and alike and elements <= EXCHANGED_PADDED_SUMS
    room = elements <= EXCHANGED_SUMS and EXCHANGED_COLUMNS * config.split_k <= columns
    return stored_complete and room and columns <= HALVED_COLUMNS and columns.bit_count() == 1


def arguments(template: KernelTemplate, problem: Problem) -> dict[str, tuple[str, str]]:
    """Return a kernel's operand parameters by name, in order: the operand, and its descriptor or "" for a pointer."""
    found: dict[str, tuple[str, str]] = {}
    for name in operands(problem):
        given = [d for d in template.descriptors if operand_of(d) == name]
        found |= {f"{d}_desc": (name, d) for d in given}
        by_pointer = not given or name in template.pointers or (name == "c" and problem.in_blocks)
        found |= {f"{name}_ptr": (name, "")} if by_pointer else {}
    return found


def pieces_of_b(problem: Problem) -> Pieces | None:
    """Return how the columns of B are interleaved in memory; None where they are not."""
    return None if problem.b.order == PLAIN else registry.get(WeightLayout, problem.b.order).pieces(problem.b.type)


def has_four_bit_weight(problem: Problem) -> bool:
    """Return whether two numbers of B share a byte, beside an A whose numbers are wider."""
    return problem.b.type.packed > problem.a.type.packed


def apart_in_bytes(problem: Problem) -> int:
    """Return the elements along K between the two numbers in a byte of a weight of four bits; 0 of other weights."""
    if not has_four_bit_weight(problem):
        return 0
    return 1 if problem.b.order == PLAIN else registry.get(WeightLayout, problem.b.order).apart()


def in_fragments(problem: Problem) -> bool:
    """Return whether B is a weight of four bits whose blocks are what threads give a matrix instruction."""
    return problem.b.order != PLAIN and registry.get(WeightLayout, problem.b.order).fragments()


def reads_b(template: str, problem: Problem) -> bool:
    """Return whether a template's kernel reads B's type in the order in which it is stored."""
    facts = kernel_template(template)
    if problem.groups and problem.fold > 1 and facts.descriptors:
        return False  # columns of gate and of up are apart there, and a descriptor reads neighbours
    if in_fragments(problem) or facts.fragments:
        multiplies = not facts.descriptors or problem.a.type.bytes == 2  # A as the copy engine fetches it
        return facts.fragments and in_fragments(problem) and multiplies
    if has_four_bit_weight(problem):
        return facts.four_bits
    return problem.b.order == PLAIN or (facts.pieces and pieces_of_b(problem) is not None)


def reads_scales(layout: str) -> bool:
    """Return whether kernels read MX factors in this layout."""
    return all(scale_places(layout))


def operand_of(descriptor: str) -> str:
    """Return the operand that a descriptor describes."""
    return descriptor.removesuffix("_tail")


def stored_block(block: tuple[int, int], row_major: bool, packed: int) -> tuple[int, int]:
    """Return a block's extents in storage order, as a descriptor has them; `packed` elements of a row share a byte."""
    rows, columns = block if row_major else block[::-1]
    return rows, columns // packed


def names() -> list[str]:
    """Return all kernel templates."""
    return sorted(p.stem for p in (TEMPLATES / "kernels").glob("*.j2") if not p.stem.startswith("_"))


@cache
def kernel_template(name: str) -> KernelTemplate:
    """Return the facts of one template.

    Raises:
        InputError: no such template, or a key or value of its header that nothing reads; says which.
    """
    path = TEMPLATES / "kernels" / f"{name}.j2"
    if name not in names():
        raise InputError(f"no kernel template is called {name!r}; there are: {', '.join(names())}")
    facts = read_header(path, {f.name for f in fields(KernelTemplate)} - {"name"} | {"names", "inherit"})
    named: dict[str, str] = facts.get("names", {})

    def spelled_out(fact: Any) -> Any:
        if isinstance(fact, dict):
            return {key: spelled_out(value) for key, value in fact.items()}
        if isinstance(fact, list):
            return tuple(map(spelled_out, fact))
        if isinstance(fact, bool):
            return fact
        text = str(fact).replace("{name}", name)
        return re.sub(r"[A-Z_]+", lambda word: f"({named[word[0]]})" if word[0] in named else word[0], text)

    read = {k: v if k == "defaults" else spelled_out(v) for k, v in facts.items() if k != "names"}
    order = _known_facts(path.name, "order", read.get("order", {}), OrderFacts)
    order |= {name: int(order[name]) for name in ("long_block", "most_runs") if name in order}
    search = _search_facts(path.name, _known_facts(path.name, "search", facts.get("search", {}), SearchFacts))
    return KernelTemplate(name=name, **read | {"order": OrderFacts(**order), "search": search})


def _known_facts(file: str, section: str, given: dict[str, Any], of: type) -> dict[str, Any]:
    """Return the facts of a section of a header, all of which are fields of a class."""
    if unknown := sorted(set(given) - {f.name for f in fields(of)}):
        raise InputError(f"templates/kernels/{file}: {section} has {', '.join(unknown)}, which nothing reads")
    return given


def _search_facts(file: str, section: dict[str, Any]) -> SearchFacts:
    if (grid := section.get("grid", _UNKNOWN.grid)) not in GRIDS:
        raise InputError(f"templates/kernels/{file}: search.grid is {grid!r}; there are: {', '.join(GRIDS)}")
    given = section.get("rules", [])
    rules = frozenset(map(str, given if isinstance(given, list) else [given]))
    if unknown := sorted(rules - RULE_GROUPS):
        there = ", ".join(sorted(RULE_GROUPS))
        raise InputError(f"templates/kernels/{file}: search.rules has {', '.join(unknown)}; there are: {there}")
    return SearchFacts(**{**section, "rules": rules})


@cache
def search_facts(template: str) -> SearchFacts:
    """Return what the search must know of a template; the defaults for one that is not here, as other backends have."""
    return kernel_template(template).search if template in names() else _UNKNOWN


def odd_block(config: Config) -> str | None:
    """Return the first side of a tile that no kernel of its template supports, and what it must be; or None."""
    template = kernel_template(config.template)
    swapped = template.value(config, "swap_ab") == 1
    with_roles = "tail" in template.constexprs
    padded = padded_columns(config)
    for axis, wide in (("block_m", swapped), ("block_n", not swapped), ("block_k", False)):
        value = getattr(config, axis)
        if with_roles and axis != "block_k" and not wide:
            groups = max(1, config.num_warps // WARPS_OF_A_GROUP)
            if value < 1 or value % groups or (value // groups).bit_count() > 1:
                return f"{axis} must be a power of two for each of the {groups} groups of 4 warps, not {value}"
        elif padded and wide:
            if value % PADDED_STEP or value > MOST_PADDED:
                others = f"the sum of two, or a multiple of {PADDED_STEP} up to {MOST_PADDED}"
                return f"{axis} must be a power of two, {others}, not {value}"
        elif value < 1 or value.bit_count() > 1 + (with_roles and wide):
            return f"{axis} must be a power of two{' or the sum of two' if with_roles and wide else ''}, not {value}"
    return None


def fault(config: Config, known: Collection[str] = ()) -> str | None:
    """Return why no problem can be computed with a config's numbers, or None.

    `known` are the names of the options that the target's compiler takes.
    """
    template = kernel_template(config.template)
    if odd := odd_block(config):
        return odd
    if config.num_warps < 1 or (config.num_warps.bit_count() > 1 and "num_warps" not in template.constexprs):
        return f"num_warps must be a power of two, not {config.num_warps}"
    for axis in ("group_m", "split_k", "num_stages"):
        if getattr(config, axis) < 1:
            return f"{axis} must be at least 1, not {getattr(config, axis)}"
    usable = {*template.constexprs, *known} - DERIVED
    unknown = [name for name, _ in config.options if name not in usable]
    if unknown:
        return f"nothing reads {', '.join(unknown)}; its options can be {', '.join(sorted(usable)) or 'none'}"
    return None


def compiler_options(config: Config) -> dict[str, int]:
    """Return the options of a config that go to the compiler rather than into the kernel's text."""
    template = kernel_template(config.template)
    options = {k: v for k, v in config.options if k not in template.constexprs}
    fixed = {k: _of_constants(v, config) for k, v in template.compiler.items()}
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **options, **fixed}


def _of_constants(expression: str, config: Config) -> int:
    """Return the value of a fact that depends on a config alone, not on M, N and K."""
    scope = kernel_template(config.template).constants(config)
    scope |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPLIT_K": config.split_k}
    return _evaluate(expression, scope)


def _evaluate(expression: str, scope: dict[str, int]) -> int:
    return int(eval(_code(expression), {"__builtins__": {}, "min": min}, scope))


@cache
def _code(expression: str) -> CodeType:
    """Return a fact's expression, compiled once: it is evaluated for every config."""
    return compile(expression, "facts", "eval")
