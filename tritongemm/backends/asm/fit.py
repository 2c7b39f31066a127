"""The rules by which an assembly kernel can compute a problem, and its splits along K."""

import re
from contextlib import suppress

from tritongemm.backends.asm import param_layout, scaled
from tritongemm.backends.asm.manifest import KernelRow, whole_number
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import Scaling
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.compilers import toolchain

COUNTERS = 16 * 64  # of AITER's semaphore, one a tile
_MOST_SPLITS = 16
_FETCHED = 3  # steps of K that AITER's bf16 kernels fetch before the first check; a smaller A faults (ROCm/aiter#5781)
_SMALL = 2**31  # bytes
_ARCH, _DIRECTIVE = re.compile("gfx[0-9a-f]{3,4}"), re.compile(rb'\.amdgcn_target\s+"[\w-]+--(gfx[0-9a-f]+)')
_SCALES = {"scale_a", "scale_b"}


def layout_name(row: KernelRow) -> str:
    """Return the name of the declared layout, "" if the manifest lists the parameters."""
    layout = param_layout.declared(row.layout, row.symbol)
    return layout.name if isinstance(layout, param_layout.Layout) else ""


def refusal(row: KernelRow, problem: Problem, target: Target) -> str | None:
    """Return why a kernel can't compute a problem, or None."""
    try:
        name = layout_name(row)
    except InputError as error:
        return str(error)
    if (arch := _find_arch(row) or target.name) != target.name:
        return f"its code object is for {arch}, not {target.name}"
    if row.shuffled and problem.b.order == PLAIN:
        return "B must be shuffled beforehand, and this one's is not"
    if not row.shuffled and problem.b.order != PLAIN:
        return f"it reads B as it is, this one is in the order {problem.b.order}"
    if name in scaled.LAYOUTS:
        return scaled.refusal(name, row, problem)
    return _bf16_refusal(row, problem) if name == "bf16" else _own_refusal(row, problem)


def _find_arch(row: KernelRow) -> str:
    """Return what architecture a code object is for, of an absent one that of its folder; "" where nothing says."""
    if not row.path.is_file():  # AITER has hsa/gfx942/bf16gemm
        return next(filter(_ARCH.fullmatch, reversed(row.path.absolute().parts[:-1])), "")
    with suppress(InputError):  # building it will say what is wrong with a damaged one
        if row.path.suffix not in toolchain.SUFFIXES:
            return code_object.arch(row.path.read_bytes())
        directive = _DIRECTIVE.search(row.path.read_bytes())
        return directive[1].decode() if directive else ""
    return ""


def _bf16_refusal(row: KernelRow, problem: Problem) -> str | None:
    if problem.a.scaling is not None or problem.b.scaling is not None:
        return "it applies no scales"
    outputs = ("fp32",) if "outf32" in row.symbol else ("bf16", "fp32")
    if (problem.a.dtype, problem.b.dtype) != ("bf16", "bf16") or problem.c.dtype not in outputs:
        return f"it reads bf16 and writes {' or '.join(outputs)}, not {problem.dtypes}"
    if problem.layout != "TN":
        return f"it reads A row-major and B column-major (TN), not {problem.layout}"
    if problem.k % row.sub_k or problem.n % row.tile_n:
        return f"K must be a multiple of {row.sub_k} and N of {row.tile_n}"
    if problem.bias != "none" and not (row.bias and problem.bias == "n" and problem.bias_dtype.name == "bf16"):
        return f"it adds {'a bf16 bias along N' if row.bias else 'no bias'}, not {problem.bias}"
    largest = max(problem.m * problem.k * 2, problem.n * problem.k * 2, problem.m * problem.n * problem.c.type.bytes)
    if largest >= scaled.REACH:
        return f"an operand of {largest} bytes is beyond its 32-bit offsets"
    if problem.m * problem.k < _FETCHED * row.sub_k:
        return f"it fetches {_FETCHED * row.sub_k} elements of A before it looks at K; A has {problem.m * problem.k}"
    tiles = cdiv(problem.m, row.tile_m) * (problem.n // row.tile_n)
    if row.split_k and (tiles > COUNTERS or problem.k < 2 * row.sub_k):
        return f"it splits K always: {tiles} tiles for {COUNTERS} counters, K {problem.k} for two splits of {row.sub_k}"
    return None


def _own_refusal(row: KernelRow, problem: Problem) -> str | None:
    """Return why a kernel whose manifest lists its parameters can't compute a problem, or None.

    Such a manifest says what its kernels compute in the columns dtypes, trans, multiple and small.
    """
    for column, value in (("dtypes", problem.dtypes), ("trans", problem.layout)):
        if row.others.get(column, value) != value:
            return f"it is for {row.others[column]}, not {value}"
    wanted, has = ({*names} & _SCALES for names in ({e.name for e in problem.extras}, row.layout.lower().split()))
    if wanted != has:
        takes, given = (" and ".join(sorted(names)) for names in (has, wanted))
        return f"it takes {takes or 'no scales'}, the problem has {given or 'none'}"
    if {problem.a.scaling, problem.b.scaling} - {None, Scaling()}:
        return "its scales are those of rows and columns"
    if problem.bias != ("n" if row.bias else "none"):
        return f"it adds {'a bias along N' if row.bias else 'no bias'}, not {problem.bias}"
    multiples = [whole_number(v) or 0 for v in row.others.get("multiple", "1/1/1").split("/")]
    if len(multiples) != 3 or 0 in multiples:
        return f"column multiple is {row.others['multiple']!r}, not three numbers as in 1/16/64 for M, N and K"
    odd = [n for n, s, m in zip("MNK", (problem.m, problem.n, problem.k), multiples, strict=True) if s % m]
    if odd:
        return f"{' and '.join(odd)} must be multiples as in {row.others['multiple']}"
    large = [name for name in row.others.get("small", "").split() if _bytes(name, row, problem) >= _SMALL]
    return f"{' and '.join(large)} must be less than 2 GiB, which its offsets reach" if large else None


def _bytes(name: str, row: KernelRow, problem: Problem) -> int:
    """Return the size of one operand of a kernel of this project."""
    m, n, k = problem.m, problem.n, problem.k
    if name == "workspace":
        tiles = cdiv(m, row.tile_m) * cdiv(n, row.tile_n)
        return 4 * tiles * row.tile_m * row.tile_n * _fixed_split(row)
    return {
        "a": problem.a.type.bytes * m * k,
        "b": problem.b.type.bytes * n * k,
        "c": problem.c.type.bytes * m * n,
    }.get(name, 0)


def _fixed_split(row: KernelRow) -> int:
    """Return the splits along K of a kernel of this project."""
    return whole_number(row.others.get("split", "")) or 1


def splits(row: KernelRow, problem: Problem, target: Target) -> list[int]:
    """Return the splits along K with which a kernel is tried."""
    if not layout_name(row):
        return [_fixed_split(row)]
    if not row.split_k:
        return [1]
    if layout_name(row) in scaled.LAYOUTS:
        return scaled.splits(layout_name(row), problem.k)
    tiles = cdiv(problem.m, row.tile_m) * cdiv(problem.n, row.tile_n)
    wanted = 4 if tiles >= target.compute_units else target.compute_units // tiles
    return list(range(2, max(2, min(_MOST_SPLITS, wanted, problem.k // row.sub_k)) + 1))
