"""The text of a generated module, rendered from a problem and its configs."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tritongemm.codegen.config_memo import ConfigMemo
from tritongemm.codegen.geometry import batch_strides, evaluate, geometry
from tritongemm.codegen.source_trees import parse
from tritongemm.codegen.specialised_text import specialise
from tritongemm.codegen.template_facts import (
    MOST_FEW_ROWS,
    TEMPLATES,
    KernelTemplate,
    adds_blocks,
    apart_in_bytes,
    arguments,
    columns_at_once,
    compiler_options,
    has_four_bit_weight,
    in_fragments,
    kernel_template,
    operand_of,
    operands,
    pieces_of_b,
)
from tritongemm.codegen.wrapped_lines import WIDTH, wrap_text
from tritongemm.core.config import Config
from tritongemm.core.dtypes import DTYPES, E8M0_BIAS, DType
from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.errors import InputError
from tritongemm.core.operands import OperandSpec
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics.scale_factors import block_order, scale_places
from tritongemm.plugins.contracts import Pieces

if TYPE_CHECKING:
    from jinja2 import Environment

# What `tl.dot_scaled` calls types with powers of two along K.
# What a caller of a winner calls: the product, and what puts B into the order that its kernel reads.
CALLED = ("matmul", "in_pieces", "in_fragments", "in_halves")
DOT_FORMATS = {"fp4e2m1": "e2m1", "fp8e4m3fn": "e4m3", "fp8e5m2": "e5m2"}
TL = {"fp16": "tl.float16", "bf16": "tl.bfloat16", "fp32": "tl.float32", "int8": "tl.int8", "int32": "tl.int32"}


@dataclass(frozen=True)
class KernelFacts:
    """The facts of a problem and a target on which a kernel's text depends, besides the layouts."""

    acc: str  # accumulator type, as written in a kernel
    widen: str  # conversion of one block's sum to it, where block sums are added separately; "" if none is needed
    total: str  # type in which the epilogue works
    # Operands beside A and B, as the epilogue applies them, and those that the main loop applies.
    extras: tuple[OperandSpec, ...]
    arguments: tuple[str, ...]  # their names in the order of Python functions' parameters, scales before a bias
    # Parameters of a batched kernel with the strides between the operands of its products.
    batch_strides: tuple[str, ...]
    # Type that operands are converted to before the dot, as their types differ or Triton's interpreter wants it; ""
    # where they are not.
    compute: str
    fp8_pair: bool  # operands have two different fp8 types, which some compilers multiply with the wrong instruction
    dot_options: str  # further arguments of `tl.dot`
    long_sum: bool  # whether block sums are added up in float32
    # Smallest and largest value of a narrow C, as written in a kernel; empty where nothing is clamped.
    bounds: tuple[str, ...]
    zero: str  # the value of masked-off loads
    unit: str  # elements that share a byte, as what divides a number of them; "" where each has its own
    formats: tuple[str, ...]  # what `tl.dot_scaled` calls the types of A and B; empty where no such factors are there
    # Where a weight of four bits is multiplied by a wider A: elements along K from the number in the low half of a byte
    # to the one in its high half; 0 elsewhere.
    apart: int
    fragments: bool
    pieces: Pieces | None  # how the columns of B are interleaved in memory; None if B is row-major or column-major
    narrows: bool  # an instruction turns a result into C's type; otherwise the compiler converts
    # Instructions turn bytes of two numbers each and their factors into numbers; otherwise the compiler does it or
    # matrix units read them.
    unpacks: bool
    epilogue: str  # what is done with the complete sum at last, of `core.epilogues.EPILOGUES`

    @property
    def along_k(self) -> tuple[OperandSpec, ...]:
        """The operands with scale factors that change along K."""
        return tuple(e for e in self.extras if e.applied == "mainloop")

    @property
    def of_sums(self) -> KernelFacts:
        """The facts of a kernel whose matrix units see operands that factors along K have multiplied."""
        return replace(self, extras=tuple(e for e in self.extras if e.applied != "mainloop"))

    @property
    def formula(self) -> str:
        """The formula of C, as a kernel's docstring writes it."""
        shapes = {"m": "[M, 1]", "n": "[N]", "mn": "[M, N]"}
        a, b = (f" * {name}" if name in {e.name for e in self.along_k} else "" for name in ("scale_a", "scale_b"))
        after = (f" {e.operator} {e.name}{'' if e.single else shapes[e.along]}" for e in self.extras if e.operator)
        product = f"{f'(a{a})' if a else 'a'}[M, K] @ {f'(b{b})' if b else 'b'}[K, N]" + "".join(after)
        return product if self.epilogue in ("none", RESIDUAL) else f"{self.epilogue}({product})"


def accumulator(problem: Problem) -> DType:
    """Return the type of sums over K: exact for integers, unless factors that change along K multiply parts of them."""
    exact = common_type(problem.a.type, problem.b.type).is_integer and not problem.scale_depth
    return DTYPES["int32" if exact else "fp32"]


def common_type(a: DType, b: DType) -> DType:
    """Return the narrowest type that holds both operands, in which the dot is computed."""
    if a == b or (a.is_fp8 and b.is_fp8):
        return a
    names = {a.name, b.name}
    if names & {"int4", "fp4e2m1"} and "fp16" not in names:
        return DTYPES["bf16"]
    if "fp32" in names or names == {"fp16", "bf16"}:
        return DTYPES["fp32"]
    wide = [d for d in (a, b) if d.name in ("fp16", "bf16")]
    return wide[0] if wide else DTYPES["fp16"]


def kernel_facts(problem: Problem, target: Target) -> KernelFacts:
    """Return the facts of a problem and a target on which its kernels' text depends."""
    compute = common_type(problem.a.type, problem.b.type)
    integer = compute.is_integer
    dot_options = ""
    if compute.name == "fp32":
        dot_options = f', input_precision="{"tf32" if target.has("tf32") else "ieee"}"'
    if integer:
        dot_options = ", out_dtype=tl.int32"
    acc = TL[accumulator(problem).name]
    alike, both_fp8 = problem.a.type == problem.b.type, problem.a.type.is_fp8 and problem.b.type.is_fp8
    apart = apart_in_bytes(problem)
    long_sum = adds_blocks(problem, target)
    if long_sum:
        dot_options = ", max_num_imprecise_acc=BLOCK_K"
    unpacked = problem.microscaled and alike and not target.has("scaled_matrix")
    return KernelFacts(
        acc=acc,
        widen=f".to({acc})" if integer and acc == TL["fp32"] else "",
        total=TL["fp32"] if any(e.operator == "*" for e in problem.extras) else acc,
        extras=problem.extras,
        arguments=operands(problem)[3:-3] + (("bias",) if "bias" in problem.operands else ()),
        batch_strides=batch_strides(problem),
        compute=_computed_in(problem, compute),
        long_sum=long_sum,
        fp8_pair=both_fp8 and not alike and target.has("matrix_instr_nonkdim"),
        dot_options=dot_options,
        bounds=_bounds(problem.c.type, integer),
        zero="0" if integer or compute.packed > 1 else "0.0",
        unit=f" // {compute.packed}" if compute.packed > 1 else "",
        formats=(DOT_FORMATS[problem.a.dtype], DOT_FORMATS[problem.b.dtype]) if problem.microscaled else (),
        apart=apart,
        fragments=in_fragments(problem),
        pieces=pieces_of_b(problem),
        narrows=problem.c.type.is_fp8 and target.supports(problem.c.type) and target.has("narrow_fp8"),
        unpacks=((unpacked and problem.a.dtype == "fp4e2m1") or apart > 0) and target.has("unpack_four_bits"),
        epilogue=problem.epilogue,
    )


def _computed_in(problem: Problem, compute: DType) -> str:
    """Return the type that operands are converted to before the dot, as written in a kernel; "" where they are not."""
    if compute.name == "bf16" or has_four_bit_weight(problem):
        return compute.name.upper()
    alike = problem.a.type == problem.b.type or (problem.a.type.is_fp8 and problem.b.type.is_fp8)
    return "" if alike else TL[compute.name]


def _bounds(c: DType, integer: bool) -> tuple[str, ...]:
    """Return the smallest and largest value of a narrow C, as written in a kernel; empty where nothing is clamped."""
    if not (c.is_fp8 or c.name == "int8"):
        return ()
    low, high = -c.maximum - (c.name == "int8"), c.maximum
    return (f"{int(low)}", f"{int(high)}") if integer else (f"{low}", f"{high}")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # serving loads compiled kernels without it

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # Python and C++, not HTML
        auto_reload=False,  # a kernel imports up to a dozen files, and looking whether each has changed takes longest
    )
    made.filters["wrapped"] = wrap_text
    return made


def render_cpp(template: str, **values: Any) -> str:
    """Return the C++ text of a template, by its path below templates/, e.g. ``ck/xdl.j2``."""
    lines = _environment().overlay(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False)
    text: str = lines.get_template(template).render(**values)
    return text


@cache
def kernel_source(problem: Problem, template: str, target: Target) -> str:
    """Return the text of one kernel, the same for every size of one combination of dtypes, layouts and bias."""
    from jinja2 import TemplateError, TemplateSyntaxError

    meta = kernel_template(template)
    known = {"p": problem, "x": kernel_facts(problem, target), "meta": meta, "target": target}
    known |= {"scale_places": scale_places, "block_order": block_order, "most_few_rows": MOST_FEW_ROWS}
    try:
        text = _environment().get_template(f"kernels/{template}.j2")
        return text.render(parameters=list(arguments(meta, problem)), **known).strip() + "\n"
    except TemplateSyntaxError as error:
        raise InputError(f"templates/{error.name}: line {error.lineno}: {error.message}") from None
    except TemplateError as error:
        raise InputError(f"templates/kernels/{template}.j2, or what it imports: {error}") from None


@cache
def kernel_alone(problem: Problem, template: str, target: Target) -> str:
    """Return the text of one kernel as a module of its own, the only text that is run to compile it."""
    text = _environment().get_template("kernel_alone.py.j2")
    known = {"x": kernel_facts(problem, target), "templates": {}, "p": problem, "target": target}
    return text.render(kernel=kernel_source(problem, template, target), **known)


def module_name(problem: Problem) -> str:
    """Return the file name of a problem's generated module, without ``.py``."""
    plain = Problem(problem.m, problem.n, problem.k)
    suffix = "" if problem == plain else "_" + problem.key.split("_", 1)[1].replace("-", "_")
    return f"generated_kernel_{problem.m}_{problem.n}_{problem.k}{suffix}"


def _rows(configs: list[Config], problem: Problem) -> Iterator[str]:
    """Yield a line for each config: its name, its kernel's constants in capitals, the options of the compiler."""

    def pairs(config: Config) -> str:
        constants = kernel_template(config.template).constants(config, columns_at_once(problem))
        return " ".join(f"{k}={v}" for k, v in (constants | compiler_options(config)).items())

    for c, rest in zip(configs, ConfigMemo(configs).map(pairs), strict=True):
        blocks = f"BLOCK_M={c.block_m} BLOCK_N={c.block_n} BLOCK_K={c.block_k} GROUP_M={c.group_m} SPLIT_K={c.split_k}"
        yield f"{c.name} {blocks} {rest}"


def _render(template: str, problem: Problem, configs: list[Config], target: Target, **extra: Any) -> str:
    used = sorted({c.template for c in configs})
    return (
        _environment()
        .get_template(template)
        .render(
            p=problem,
            x=kernel_facts(problem, target),
            target=target,
            configs=configs,
            rows="\n".join(_rows(configs, problem)),
            kernels={name: kernel_source(problem, name, target) for name in used},
            templates={name: kernel_template(name) for name in used},
            module_name=module_name(problem),
            operand_of=operand_of,
            scale_places=scale_places,
            sized_needs=_sized_needs,
            plain=plain,
            fill=fill,
            **extra,
        )
    )


def module(
    problem: Problem,
    configs: list[Config],
    target: Target,
    tolerance: float,
    input_deviation: float,
    typical_scale: float = 1.0,
    library: str = "",
) -> str:
    """Return a module with all candidates of one problem, which verifies and times them when run by itself.

    `tolerance` is the largest error that passes, as the family measures it. Random operands have the standard deviation
    `input_deviation`, scale factors the median `typical_scale`. `library` is PyTorch's function for the problem, or "".
    """
    more = {
        "tolerance": tolerance,
        "input_deviation": input_deviation,
        "typical_scale": typical_scale,
        "library": library,
        "rotating_mb": 3 * target.llc_bytes >> 20,
    }
    plain = list(dict.fromkeys(without_edits(config, problem, target.compute_units) for config in configs))
    return _render("module.py.j2", problem, plain, target, **more)


def without_edits(config: Config, problem: Problem, compute_units: int) -> Config:
    """Return the config that a kernel has whose assembly is not edited: itself, or one that the compiler takes."""
    expressions = kernel_template(config.template).without_edits
    sizes: dict[str, Any] = {n: evaluate(e, config, problem, compute_units) for n, e in expressions.items()}
    return replace(config, **sizes)


def winner(problem: Problem, config: Config, target: Target, remark: str) -> str:
    """Return a small module with one config, to paste into a project; `remark` states the measurements."""
    config = without_edits(config, problem, target.compute_units)
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        **kernel_template(config.template).constants(config, columns_at_once(problem)),
    }
    needed = geometry(config, problem, target.compute_units)
    more = {
        "remark": remark,
        "constants": constants,
        "options": compiler_options(config),
        "shares_memory": needed.workspace_bytes + needed.semaphore_bytes > 0,
        "count_of": partial(_count, problem),
        "meaning_of": partial(_meaning, problem),
    }
    text = _render("winner.py.j2", problem, [config], target, **more)
    known = {**constants, "GROUPS": problem.group_count, "MASKED": problem.masked, "EDITED": 0, "CONFIG": ""}
    return specialise(text, CALLED, known)


def _count(problem: Problem, operand: OperandSpec) -> str:
    """Return the number of an operand's elements, as written in a module."""
    products = ("len(b)" if problem.a.shared else "len(a)") if operand.batch else ""
    if operand.name == problem.group_operand:
        return str(problem.group_count)
    along_a = operand.name == "scale_a" or (operand.name == "bias" and problem.bias == "m")
    extent, scaling = {"mn": "M * N"}.get(operand.along, "M" if along_a else "N"), operand.scaling
    if along_a and problem.masked:
        extent = f"{problem.group_count} * M"
    if scaling is not None:
        extent = _padded(extent, scaling.rows, scaling.pad[0])
        if scaling.depth:
            extent += f" * {_padded('K', scaling.depth, scaling.pad[1])}{' * 2' * scaling.zeros}"
    groups = str(problem.group_count) if problem.groups and operand.name == "scale_b" else ""
    return " * ".join(filter(None, (products, groups, extent)))


def _padded(extent: str, share: int, pad: int) -> str:
    """Return how many factors an extent has, of which each covers `share` elements."""
    count = {0: "1", 1: extent}.get(share, f"cdiv({extent}, {share})")
    return count if pad == 1 else f"cdiv({count}, {pad}) * {pad}"


def _meaning(problem: Problem, operand: OperandSpec) -> str:
    """Return what an operand besides A and B is, in a few words behind its type."""
    if operand.name == "bias":
        each = {"m": "row", "n": "column", "mn": "element"}[operand.along]
        return f", one for each {each} of C"
    if operand.scaling is None:
        return ": the row behind each group's last" if operand.name == "offsets" else ": the rows of each group"
    scaling = operand.scaling
    rows = "row" if operand.name == "scale_a" else "column"
    share = {0: f"all {rows}s", 1: f"each {rows}"}.get(scaling.rows, f"{scaling.rows} {rows}s")
    meaning = f", one for {share} of {operand.name[-1]}"
    if not scaling.depth:
        return meaning
    across = _padded("M" if operand.name == "scale_a" else "N", scaling.rows, scaling.pad[0])
    along = _padded("K", scaling.depth, scaling.pad[1])
    shapes = {"rows": f"[{across}, {along}]", "groups": f"[{along}, {'2, ' * scaling.zeros}{across}]"}
    stored = f"as {shapes[scaling.layout]}" if scaling.layout in shapes else f"in the layout `{scaling.layout}`"
    zeros = ", then as many zero points less 8" if scaling.zeros else ""
    powers = f"; 2 ** (byte - {E8M0_BIAS})" if scaling.dtype == "e8m0" else ""
    return f"{meaning} and {scaling.depth} elements along K{zeros}, {stored}{powers}"


def plain(expression: str) -> str:
    """Return an expression without brackets that do nothing."""
    return ast.unparse(parse(expression))


def fill(text: str, pad: int) -> str:
    """Return words of a docstring as lines, the first of which follows `pad` blanks."""
    blanks = " " * pad
    return textwrap.fill(text, WIDTH - 3, initial_indent=blanks, subsequent_indent=blanks + "    ").strip()


def _sized_needs(template: KernelTemplate) -> list[tuple[str, str]]:
    """Return what a template needs of M, N and K, in words and as written in a module."""
    given = {"M", "N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SPLIT_K", "COMPUTE_UNITS", "GROUPS", "MASKED"}
    given |= {"cdiv", "min", "max", *(o.upper() for o in template.constexprs)}
    found = []
    for words, expression in template.needs.items():
        # Modules run without edits: splits of a tile add their sums through L2, and need no block of K each.
        written = plain(expression.replace("EVEN_K", "K % BLOCK_K == 0").replace("EXCHANGE", "0"))
        names = {n.id for n in ast.walk(parse(written)) if isinstance(n, ast.Name)}
        if names & {"M", "N", "K"} and names <= given and not written.startswith("0 == 0 or"):
            found.append((words, written))
    return found
