"""The algorithms of cuBLASLt or hipBLASLt: listing them, naming them by configs, and calling them.

C is row-major, the libraries are column-major, so they compute C^T = B^T A^T: their A is our B, the rows of their tile
are our columns. A bias per column of C is fused; any other is first copied into C, and C is added, two kernels in one
call.
"""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from math import ceil
from typing import Any

from tritongemm.backends.blaslt import scale_modes
from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.blaslt.matmul import PreparedMatmul
from tritongemm.hip_ext.blaslt.tables import Algorithm, Matmul, Matrix
from tritongemm.hip_ext.blaslt.variants import all_algorithms
from tritongemm.hip_ext.driver import driver

NAMELESS = "heuristic"  # the template of a library that does not name its kernels
WORKSPACE_BYTES = 64 << 20
REQUESTED = {"nvidia": 1024, "amd": 4096}
ANY_ADDRESS = 1 << 20  # A bias or a scale is moved from here before it is used.
# Where a product has two ways to accumulate, this share of the algorithms asked for is listed of each. On an H200 the
# first 32 of 48 had the fastest at 98 of 99 sizes of fp8; at the other size their fastest was 0.2 % slower.
SHARE_OF_TWO = 2 / 3
_PLACE = ("index", "version")  # where an algorithm was found, not its identity
_MACRO_TILE, _SPLIT = re.compile(r"_MT(\d+)x(\d+)x(\d+)"), re.compile(r"_GSU(\d+)")


def vendor() -> str | None:
    """Return the vendor of this machine's GPU, ``nvidia`` or ``amd``; None if there is no GPU."""
    return driver.find_vendor()


def library() -> blaslt_library.Library:
    """Return the library of this machine's GPU."""
    return blaslt_library.open_library(vendor() or "nvidia")


def version() -> int:
    """Return the version of the current device's library; solution indices are valid within one version."""
    import torch

    return library().version(torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _stream(device: int) -> int:
    """Return the handle of torch's current stream."""
    import torch

    return int(torch._C._cuda_getCurrentRawStream(device))


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, as handles belong to one device."""
    import torch

    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def _workspace(device: Any, stream: int) -> Tensor:
    """Return the scratch memory of one stream, as calls on two streams must not share it."""
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _plan(library: blaslt_library.Library, matmul: Matmul, device: int) -> PreparedMatmul | None:
    """Return the prepared matmul, or None where the library has no algorithm for it."""
    dtypes = {m.dtype for m in (matmul.a, matmul.b, matmul.c, matmul.d)} | {matmul.scale}
    if not dtypes <= set(library.table.types):
        return None
    try:
        plan = PreparedMatmul(library, matmul, device, WORKSPACE_BYTES, REQUESTED[library.table.vendor])
        return plan if plan.algorithms else None
    except DriverError as error:
        if any(word in error.name for word in blaslt_tables.REFUSALS):
            return None
        raise


def to_matmul(problem: Problem, lead: Sequence[int], strides: Sequence[int], align: int, vendor: str) -> Matmul:
    """Return the problem in the library's terms without bias; `lead` and `strides` (from matrix to matrix) of A, B and
    C are in elements, `align` is what their addresses are multiples of, in bytes.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    rows, cols = (n, k) if problem.b.row_major else (k, n)
    left = Matrix(problem.b.dtype, rows, cols, lead[1], batch, strides[1])
    rows, cols = (k, m) if problem.a.row_major else (m, k)
    right = Matrix(problem.a.dtype, rows, cols, lead[0], batch, strides[0])
    out = Matrix(problem.c.dtype, n, m, lead[2], batch, strides[2])
    # an eight-bit float can't be added to; cuBLASLt wants a wider C beside it
    added = replace(out, dtype=problem.bias_dtype.name) if problem.c.type.is_fp8 and vendor == "nvidia" else out
    compute, scale = "fp32", "fp32"
    if problem.a.type.is_integer:
        compute, scale = "int32", "int32" if problem.c.dtype == "int32" else "fp32"
    elif problem.a.dtype == "fp32":
        compute = "tf32"
    trans = ("N" if problem.b.row_major else "T") + ("N" if problem.a.row_major else "T")
    return Matmul(left, right, added, out, trans, compute, scale, alignment=align)


def with_scales(matmul: Matmul, problem: Problem) -> Matmul | None:
    """Return the product with the problem's scale factors, whose addresses every launch gets; None if impossible.

    The libraries have scaled products for single products only, not for batches.
    """
    modes = scale_modes.modes(problem)
    if modes is None or (problem.batch > 1 and problem.a.scaling is not None):
        return None
    if problem.a.scaling is None:
        return matmul
    return replace(matmul, scales=(ANY_ADDRESS, ANY_ADDRESS, 0), scale_modes=modes)


def _prepared(problem: Problem, operands: Operands, fast: bool) -> tuple[PreparedMatmul, bool] | None:
    """Return the plan for these operands and whether the bias is in it; None where the library has nothing."""
    opened, device, bias = library(), operands["a"].device.index or 0, operands.get("bias")
    leads, strides, align = [], [], 256
    for name, row_major in (("a", problem.a.row_major), ("b", problem.b.row_major), ("c", True)):
        tensor = operands[name]
        outer, inner = (-2, -1) if row_major else (-1, -2)
        if tensor.stride(inner) != 1 and tensor.shape[inner] > 1:
            return None
        # the stride of a dimension of one element says nothing; elements that share a byte count each
        leads.append(max(tensor.stride(outer), tensor.shape[inner]) * problem.operands[name].dtype.packed)
        strides.append(tensor.stride(0) if tensor.dim() == 3 else 0)
        address = tensor.data_ptr()
        align = min(align, address & -address if address else 256)
    added = None if bias is None else bias.data_ptr()
    return _planned(opened, device, problem, tuple(leads), tuple(strides), align, added, fast)


@lru_cache(maxsize=256)
def _planned(
    opened: blaslt_library.Library,
    device: int,
    problem: Problem,
    leads: tuple[int, ...],
    strides: tuple[int, ...],
    align: int,
    bias: int | None,
    fast: bool,
) -> tuple[PreparedMatmul, bool] | None:
    """Return the plan for operands with these strides, and whether the bias is in it; None if impossible.

    A screen asks for it again for each copy of the operands, hundreds of times.
    """
    if problem.b.order != PLAIN:
        return None  # B is read as it is
    matmul = with_scales(to_matmul(problem, leads, strides, align, opened.table.vendor), problem)
    if matmul is None:
        return None
    matmul = replace(matmul, fast=fast)
    if bias is not None and problem.bias == "n" and not problem.c.type.is_integer and problem.batch == 1:
        fused = _plan(opened, replace(matmul, bias=bias, bias_dtype=problem.bias_dtype.name), device)
        if fused:
            return fused, True
    # nothing is added to an eight-bit C
    plan = _plan(opened, matmul, device) if bias is None or problem.c.type.bytes > 1 else None
    return (plan, bias is None) if plan else None


def _template(name: str) -> str:
    """Return a library's name of a kernel as a config's template."""
    return re.sub(r"\W", "_", name).replace("__bm", "_bm")


def config_of_solution(name: str, index: int, version: int = 0) -> Config:
    """Return the config of one of hipBLASLt's solutions, whose name contains its tile and its split.

    `index` is its number in a version of the library; where that is 0, unknown, it is found again by its name.
    """
    template = _template(name)
    found, split = _MACRO_TILE.search(template), _SPLIT.search(template)
    rows, cols, depth = (int(g) for g in found.groups()) if found else (0, 0, 0)
    shape = (cols, rows, depth, 1, max(1, int(split[1]) if split else 1), 0, 0)
    return Config(template or NAMELESS, *shape, options=(("index", index), ("version", version)), backend="blaslt")


def _config(algorithm: Algorithm, index: int, version: int, fast: bool) -> Config:
    values = dict(algorithm.values)
    options = {**values, "index": index, "version": version} | ({"fast": 1} if fast else {})
    name = _template(algorithm.name)
    if "solution" in values:
        own = config_of_solution(algorithm.name, options.pop("solution"), version)
        return replace(own, options=tuple((options | dict(own.options)).items()))
    else:
        rows, cols = blaslt_tables.tiles().get(values["tile"], (0, 0))
        depth, stages = blaslt_tables.stages().get(values["stages"], (0, 0))
        shape = (cols, rows, depth, 1, max(1, options.pop("splitk")), 0, stages)
    return Config(name or NAMELESS, *shape, options=tuple(options.items()), backend="blaslt")


def list_configs(problem: Problem, operands: Operands, limit: int = 0) -> list[Config]:
    """List the library's algorithms for the problem as configs, in the order of its heuristic, in the GPU's process.

    `limit` is how many at most, or two thirds as many of each of two ways to accumulate; 0 for all.
    """
    import torch

    c, current, configs = operands["c"], version(), list[Config]()
    units = torch.cuda.get_device_properties(c.device).multi_processor_count if c.is_cuda else 1
    ways = _accumulations(problem)
    limit = limit if len(ways) == 1 else ceil(SHARE_OF_TWO * limit)
    for fast in ways:
        prepared = _prepared(problem, operands, fast)
        algorithms = islice(all_algorithms(prepared[0], units), limit or None) if prepared else ()
        configs += [_config(algorithm, index, current, fast) for index, algorithm in enumerate(algorithms)]
    return configs


def _accumulations(problem: Problem) -> tuple[bool, ...]:
    # cuBLASLt's fp8 kernels come with and without promotion of the running sums, which scales along K need anyway
    both = problem.a.type.is_fp8 and all(e.applied == "epilogue" for e in problem.extras) and vendor() == "nvidia"
    return (False, True) if both else (False,)


@lru_cache(maxsize=16384)
def find(plan: PreparedMatmul, config: Config, now: int) -> Algorithm | None:
    """Return the algorithm of a config in this library version; cuBLASLt's are identified by their attributes."""
    named = config.template != NAMELESS
    wanted = {n: v for n, v in config.options if n not in (*_PLACE, "fast")}
    if plan.library.table.vendor == "nvidia":
        wanted["splitk"] = config.split_k
        for algorithm in plan.algorithms:
            values = dict(algorithm.values)
            if {**values, "splitk": max(1, values["splitk"])} == wanted:
                return algorithm
        return plan.rebuild(wanted) if "algo" in wanted else None
    if config.option("version") == now:
        found = plan.rebuild({"solution": config.option("index", -1)}) or next(
            (x for x in plan.algorithms if dict(x.values)["solution"] == config.option("index", -1)), None
        )
        if found and (not named or _config(found, 0, 0, False).template == config.template):
            return found
    matching = (x for x in plan.algorithms if named and _config(x, 0, 0, False).template == config.template)
    return next(matching, None)


def prepare_call(problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
    """Return a call that computes C with one algorithm on torch's current stream; None if the library lacks it.

    Without a config it is the library's first choice. After its first call on a stream it can be captured there.
    """
    a, b, c, bias = operands["a"], operands["b"], operands["c"], operands.get("bias")
    with _device_of(a):
        prepared = _prepared(problem, operands, bool(config and config.option("fast")))
        if not prepared:
            return None
        plan, fused = prepared
        now = plan.library.version(a.device.index or 0)
        algorithm = plan.algorithms[0] if config is None else find(plan, config, now)
    if not algorithm:
        return None
    added = c.data_ptr() if plan.matmul.c.dtype == plan.matmul.d.dtype else 0
    start = plan.prepare(algorithm, b.data_ptr(), a.data_ptr(), added, c.data_ptr(), add=not fused)
    _workspace(a.device, _stream(a.device.index or 0))
    addend = None if fused or bias is None else bias.unsqueeze(-1 if problem.bias == "m" else -2)
    if problem.a.scaling is not None:
        start = partial(_with_scales, plan, scale_modes.in_order(problem, operands), start)
    # The call keeps the operands alive, as the library has only their addresses.
    return partial(_run, start, addend, dict(operands))


def _with_scales(
    plan: PreparedMatmul, factors: Sequence[Tensor], start: Callable[[int, int], None], workspace: int, stream: int
) -> None:
    """Return a launch that sets the addresses of these factors in the shared plan."""
    for which, tensor in zip("ab", factors, strict=True):
        plan.move_scale(which, tensor.data_ptr())
    start(workspace, stream)


def _run(start: Callable[[int, int], None], addend: Tensor | None, operands: Operands) -> None:
    c = operands["c"]
    if addend is not None:
        c.copy_(addend.expand_as(c))
    stream = _stream(c.device.index or 0)
    start(_workspace(c.device, stream).data_ptr(), stream)


def identity(config: Config) -> Config:
    """Return the config without its index in one version of the library."""
    return replace(config, options=tuple(o for o in config.options if o[0] not in _PLACE))


def resolve(config: Config, problem: Problem, version: int, found: Sequence[Config] | None = None) -> Config | None:
    """Return a stored config in terms of the current library, or None, with a line in the log, if the library has none.

    While the version agrees its index is valid; else the algorithm is found by name or attributes, among `found` if
    given.
    """
    if config.option("version") == version:
        return config
    known = config.template != NAMELESS or "algo" in dict(config.options)
    for other in (_listed(problem) if found is None else found) if known else ():
        if identity(other) == identity(config):
            return other
    logging.getLogger(__name__).warning(
        "%s: %s was tuned with library version %d and is not in %d: stale, falling back",
        problem.key, identity(config).name, config.option("version"), version,
    )  # fmt: skip
    return None


def _listed(problem: Problem) -> list[Config]:
    """Return what `list_configs` gives for dense operands; their contents do not matter."""
    import torch

    def empty(rows: int, cols: int, dtype: str, row_major: bool) -> Tensor:
        shape = (rows, cols) if row_major else (cols, rows)
        lead = (problem.batch,) if problem.batch > 1 else ()
        tensor = torch.empty((*lead, *shape), dtype=getattr(torch, dtype), device="cuda")
        return tensor if row_major else tensor.transpose(-1, -2)

    a = empty(problem.m, problem.k, problem.a.type.torch, problem.a.row_major)
    b = empty(problem.k, problem.n, problem.b.type.torch, problem.b.row_major)
    c = empty(problem.m, problem.n, problem.c.type.torch, True)
    added = {e.name: torch.empty(e.count, dtype=getattr(torch, e.dtype.torch), device="cuda") for e in problem.extras}
    return list_configs(problem, {"a": a, "b": b, "c": c} | added)
