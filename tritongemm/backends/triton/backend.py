"""Backend: kernels generated from templates/kernels/ and compiled by Triton."""

from collections.abc import Iterable, Sequence
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any

from tritongemm.backends.triton import assembly_edits, compile_jobs, config_check
from tritongemm.codegen import geometry as geometry_module
from tritongemm.codegen import modules, reduction_orders, render, template_facts
from tritongemm.codegen.geometry import LARGEST_INDEX
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.epilogues import EPILOGUES
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Buffer, Launch, Param, StridePlaces
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.scaling import Scaling
from tritongemm.core.space import Space
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import BuildInputs, Capabilities, SearchedBackend
from tritongemm.search import space as search_space
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.system import settings


def compile_job(helper: HelperKernel, target: Target) -> CompileJob:
    """Return the compile job of a helper kernel."""
    overlap = {"OVERLAPS": target.has("launch_overlap")} if helper.overlaps else {}
    identity = compile_jobs.job_identity(
        target,
        source=helper.source,
        constants=dict(helper.constants) | overlap,
        options={"num_warps": helper.num_warps, "num_stages": 1},
        signature=dict(helper.signature),
        divisors={name: divisor for name, divisor in helper.divisors.items() if divisor > 1},
        small=[],
    )
    config = Config(helper.name, 0, 0, 0, num_warps=helper.num_warps, num_stages=1)
    return CompileJob(config, identity, {"vendor": target.vendor})


def make_launch(built: Artifact, helper: HelperKernel, arguments: HelperArguments) -> Launch:
    """Return the launch of a compiled helper kernel; each buffer has the name of its parameter without ``_ptr``."""
    params = [
        Param("pointer", name.removesuffix("_ptr")) if kind.startswith("*") else Param(kind, arguments.numbers[name])
        for name, kind in helper.signature.items()
    ]
    return compile_jobs.make_launch(built, arguments.grid, params)


SIZES = ("M", "N", "K", "stride_a", "stride_b", "stride_c")
NUMBERS = (*SIZES, "GROUP_M")
_SMALL = 2**31  # bytes that an offset of 32 bits reaches: a buffer instruction's
# The parameters after the operands, as manifests name them.
_MANIFEST_SIZES = ("m", "n", "k", "lda", "ldb", "ldc", "group_m")
_WIDEST = 4  # bytes of an element


class TritonBackend(SearchedBackend):
    """Kernels rendered from templates with a search space, compiled by Triton."""

    summary = "kernels generated here and compiled by Triton, which a strategy searches"
    has_manifest_rows = True
    has_helpers = True
    capabilities = Capabilities(
        kinds=("one", "batched", "grouped"),
        orders_b=(PLAIN, "shuffled_16x16", "halves_32", "halves_128", "fragments"),
        scales=("epilogue", "mainloop"),
        tensor_scales=True,
        epilogues=EPILOGUES,
    )

    def available(self) -> Support:
        """Return whether Triton is installed."""
        return SUPPORTED if settings.version("triton") != "missing" else Support("the triton package is not installed")

    def space(self, problem: Problem, target: Target) -> Space:
        """Return all configs of a problem, before pruning."""
        return search_space.space(problem, target)

    def _supports(self, problem: Problem, target: Target) -> Support:
        return config_check.check_problem(problem, target)

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        kept = prune.prune(self.space(problem, target), problem, target).kept
        return cost_model.rank(kept, problem, target).configs

    def _has_candidates(self, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return SUPPORTED  # pruning leaves something of every space that is not empty

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return config_check.check_config(config, problem, target)

    def write_candidates(self, problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
        """Write the module with the kernels of these configs, and return its path."""
        return modules.write_candidates(problem, configs, target, folder)

    def write_winner(self, record: Record, target: Target, folder: Path) -> Path:
        """Write a record's kernel as a module to take away, and return its path."""
        return modules.write_winner(record, target, folder)

    def warm_up(self, target: Target) -> None:
        """Compile a small kernel, as a process's first compile takes half a second longer than its next ones."""
        from tritongemm.backends.triton import compiling

        compiling.warm_up(target)

    def interpreted(self, config: Config) -> Support:
        """Return whether Triton's interpreter can run a config's kernel."""
        if template_facts.kernel_template(config.template).interpreted:
            return SUPPORTED
        return Support(f"only a GPU can check a kernel of {config.template}: Triton's interpreter does not run it")

    def helper_job(self, helper: HelperKernel, target: Target) -> CompileJob:
        """Return the compile job of a helper kernel."""
        return compile_job(helper, target)

    def helper_launch(self, artifact: Artifact, helper: HelperKernel, arguments: HelperArguments) -> Launch:
        """Return the launch of a helper kernel."""
        return make_launch(artifact, helper, arguments)

    def reduction_order(self, config: Config, problem: Problem, target: Target) -> ReductionOrder | Support:
        """Return the order in which a config's kernel adds up products, or why it can't be stated."""
        return reduction_orders.reduction_order(config, problem, target)

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        identity = compile_jobs.job_identity(
            target,
            source=render.kernel_alone(problem, config.template, target),
            constants=geometry_module.constants(config, problem) | _edited(config),
            options=template_facts.compiler_options(config),
            signature=signature(config, problem),
            divisors=divisors(problem),
            small=small(config, problem, target),
        )
        return CompileJob(config, identity, {"vendor": target.vendor})

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        from tritongemm.backends.triton import compiling  # which loads Triton, for processes that compile alone

        return compiling.compile_job(job)

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch:
        return _make_launch(artifact, problem, target)

    def stride_places(self, config: Config, problem: Problem) -> StridePlaces | Support:
        """Return the places of the operands' strides in a config's launches, behind the operands themselves."""
        template = template_facts.kernel_template(config.template)
        if template.descriptors:
            return Support(f"template {config.template} describes dense operands to the copy engine")
        first, known = len(template_facts.arguments(template, problem)), divisors(problem)
        order = [*NUMBERS, *geometry_module.batch_strides(problem)]
        places = {
            name: (first + index, known.get(name, 1))
            for index, name in enumerate(order)
            if name.startswith(("stride_", "batch_"))
        }
        return StridePlaces(LARGEST_INDEX // (max(config.tile) * _WIDEST), places)

    def manifest_row(self, record: Record, launch: Launch, target: Target) -> dict[str, Any] | Support:
        """Return a tuned kernel as a row of a manifest, without its object's name; or why a manifest can't hold it."""
        problem, config = record.problem, record.config
        if any(p.kind == "tma" for p in launch.params):
            return Support("it takes tensor maps, which a manifest can't describe")
        if problem.kind != "one":
            return Support(f"a {problem.kind} product, which manifests have no word for")
        if {problem.a.scaling, problem.b.scaling} - {None, Scaling()}:
            return Support("scales of other than rows and columns, which manifests have no word for")
        if problem.bias == "m" or problem.epilogue != "none":
            return Support("a bias along M or an epilogue, which manifests have no word for")
        tiles = template_facts.kernel_template("tile").grid
        if template_facts.kernel_template(config.template).grid != tiles or launch.cluster > 1:
            return Support(f"the grid of template {config.template} is not its tiles and splits")
        order = [*template_facts.operands(problem), *_MANIFEST_SIZES]
        order += ["null"] * (len(launch.params) - len(order))  # Triton's own scratch
        # What the compiler assumed of the sizes holds for every size the kernel may compute.
        known = divisors(problem)
        depth = lcm(known.get("K", 1), config.block_k if problem.k % config.block_k == 0 else 1)
        return {
            "knl_name": launch.symbol,
            "tile_m": config.block_m,
            "tile_n": config.block_n,
            "subK": config.block_k,
            "bias": int(problem.bias == "n"),
            "layout": " ".join(order),
            "grid": "mn,k",
            "lds": launch.shared,
            "threads": launch.block[0],
            "split": config.split_k,
            "group_m": config.group_m,
            "dtypes": problem.dtypes,
            "trans": problem.layout,
            "multiple": f"{known.get('M', 1)}/{known.get('N', 1)}/{depth}",
            "small": " ".join(p.removesuffix("_ptr") for p in small(config, problem, target)),
        }


def strides(problem: Problem) -> tuple[int, int, int]:
    """Return the leading strides of A, B and C in elements, in bytes where two share one; each operand dense."""
    a, b, c = problem.leads
    return a // problem.a.type.packed, b // problem.b.type.packed, c


def batch_strides(problem: Problem) -> dict[str, int]:
    """Return the elements from one product's operand to the next one's, by parameter, in bytes where two share one.

    Empty for a single product.
    """
    operands = problem.operands
    names = geometry_module.batch_strides(problem)
    specs = {name: operands[name.removeprefix("batch_")] for name in names}
    return {n: prod(spec.shape) // spec.dtype.packed if spec.batch else 0 for n, spec in specs.items()}


def divisors(problem: Problem) -> dict[str, int]:
    """Return the largest power of two up to 16 that divides each size parameter, where it is not 1; the compiler widens
    accesses with it: rows of 1000 values start at multiples of 16 bytes, and are read so.

    M matters only where A is column-major: elsewhere it would only make two binaries of one. That holds for the strides
    of a batch too, which are multiples of M.
    """
    sizes = dict(zip(SIZES, (problem.m, problem.n, problem.k, *strides(problem)), strict=True))
    if problem.a.row_major:
        del sizes["M"]
    sizes |= batch_strides(problem.at(1) if problem.a.row_major else problem)
    found = {name: gcd(value, compile_jobs.ALIGN) for name, value in sizes.items()}
    return {name: divisor for name, divisor in found.items() if divisor > 1}


def small(config: Config, problem: Problem, target: Target) -> list[str]:
    """Return the pointer parameters to less than 2 GiB, where the target has buffer instructions.

    Those mask a load without a branch.
    Triton finds out by itself for tensors, but not for a kernel compiled ahead of time.
    """
    if not target.has("buffer_ops"):
        return []
    geometry = geometry_module.geometry(config, problem, target.compute_units)
    # Of a batch the largest product counts: each program moves its pointers, in 64 bits, to the beginning of its own.
    sizes = {name: spec.dtype.width * prod(spec.shape) for name, spec in problem.operands.items()}
    sizes |= {"workspace": geometry.workspace_bytes // problem.batch}
    pointers = [n for n, t in signature(config, problem).items() if t.startswith("*")]
    return [p for p in pointers if sizes.get(p.removesuffix("_ptr"), 0) < _SMALL]


def signature(config: Config, problem: Problem) -> dict[str, str]:
    """Return the Triton types of the kernel's run-time parameters, in order."""
    template = template_facts.kernel_template(config.template)
    types = {
        "a": problem.a.type.triton,
        "b": problem.b.type.triton,
        "c": problem.c.type.triton,
        "bias": problem.bias_dtype.triton,
    }
    types |= {e.name: e.dtype.triton for e in problem.extras}
    types |= {"workspace": render.accumulator(problem).triton, "semaphore": "i32"}
    blocks = geometry_module.geometry(config, problem, 1).descriptors
    result = {}
    for parameter, (name, descriptor) in template_facts.arguments(template, problem).items():
        if descriptor:
            rows, cols = blocks[descriptor]
            result[parameter] = f"tensordesc<{types[name]}[{rows},{cols}]>"
        else:
            result[parameter] = f"*{types[name]}"
    return result | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(geometry_module.batch_strides(problem), "i64")


def _edited(config: Config) -> dict[str, int]:
    """Return the constant that marks a kernel's assembly as edited."""
    return {assembly_edits.CONSTANT: 1} if template_facts.kernel_template(config.template).edited else {}


def _described_shapes(problem: Problem) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of the operands as descriptors have them: groups one after another, and bytes for
    elements that share one.
    """
    m, n, k, groups = problem.rows, problem.n, problem.k // problem.a.type.packed, problem.group_count
    b = (groups * k, n) if problem.b.row_major else (k, groups * n)
    return {"a": (m, k), "b": b, "c": (m, problem.columns)}


def _make_launch(built: Artifact, problem: Problem, target: Target) -> Launch:
    """Return the launch of a compiled config on one problem."""
    config = built.config
    geometry = geometry_module.geometry(config, problem, target.compute_units)
    facts = template_facts.kernel_template(config.template)
    columns, swapped = facts.columns(config), facts.value(config, "swap_ab") == 1
    lead = dict(zip("abc", strides(problem), strict=True))
    shapes = _described_shapes(problem)
    row_major = {"a": problem.a.row_major, "b": problem.b.row_major, "c": True}
    maps: list[dict[str, Any]] = list(built.launch.get("tensor_maps", []))
    params: list[Param] = []
    for name, descriptor in template_facts.arguments(facts, problem).values():
        if not descriptor:
            params.append(Param("pointer", name if name != "bias" or name in problem.operands else "c"))
            continue
        rows, cols = shapes[name] if row_major[name] else shapes[name][::-1]
        rows *= problem.operands[name].batch or 1  # one map covers the batch, whose products follow each other
        map_ = maps.pop(0)
        box = (int(map_["block_size"][0]), int(map_["block_size"][1]))
        if descriptor == ("a" if swapped else "b") and row_major[name] == swapped and built.launch.get("edited"):
            box = (min(box[0], columns), box[1])  # of a padded tile, only the columns that its products read
        if descriptor == "a" and built.launch.get("edited") and template_facts.fetches_few_rows(config, problem):
            box = (min(box[0], problem.m), box[1])
        codes = int(map_["elem_type"]), int(map_["elem_size"]), int(map_["swizzle"])
        params.append(Param("tma", name, box, (rows, cols), lead[name], *codes))
        params += [Param("i32", rows), Param("i32", cols), Param("i64", lead[name]), Param("i64", 1)]
    params += [Param("i32", v) for v in (problem.group_m, problem.n, problem.k, *strides(problem), config.group_m)]
    params += [Param("i64", v) for v in batch_strides(problem).values()]
    sizes = {"workspace": geometry.workspace_bytes, "semaphore": geometry.semaphore_bytes}
    buffers = [Buffer(name, size) for name, size in sizes.items() if size]
    # Programs of a cluster write to each other only by edited instructions; without edits each is launched alone.
    units = target.compute_units
    cluster = geometry_module.evaluate(facts.cluster, config, problem, units) if built.launch.get("edited") else 1
    return compile_jobs.make_launch(built, geometry.grid, params, buffers, target.has("launch_overlap"), cluster)
