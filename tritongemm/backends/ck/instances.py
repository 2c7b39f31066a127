"""The template parameters of a CK instance, derived from a config and a problem: how threads share a tile.

Operands that are contiguous along K are read in vectors of K1 elements (16 bytes); others in vectors along M or N, with
a K1 of four. The tile of C is written through LDS, some rows of matrix instructions at a time.
"""

from typing import Any

from tritongemm.backends._cpp_instances import power_of_two
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import SCALED_BLOCK, Scaling
from tritongemm.core.target import Target
from tritongemm.search.pruning.rules import Rule

WAVE = 64
_VECTOR = 16  # bytes
# K blocks a pipeline has under way before its loop, so that it needs one more; buffers of LDS.
PREFETCHED = {1: 0, 3: 2, 4: 3, 5: 3}
_BUFFERS = {4: 2}
_MOST_ACCUMULATORS = 256
_MX_SIDE, _MX_DEPTH = 32, 256
SHUFFLED = "_shuffled"  # ends the name of a template whose waves load B in AITER's order, straight into registers
_SHUFFLED_SIDE, _SHUFFLED_AHEAD = 16, 2  # of its matrix instructions; K blocks that it has under way before its loop
_SHUFFLED_REPEATS = 4  # instructions of a wave along M over which pipeline v3 spreads its loads, but for fp4
_SHUFFLED_LAYOUTS = {"mx": "ck::tensor_layout::gemm::MFMA"}  # what CK calls such a B; a column-major one otherwise


class Misfit(Exception):
    """A config can't be one for a problem, e.g. threads can't share a tile; the message names what does not fit."""


def operand(name: str, block: int, k: int, along_k: bool, size: int, width: int, threads: int) -> dict[str, Any]:
    """Return how threads copy a block of A or B into LDS, `block` rows (A) or columns (B) by `k`.

    Memory is contiguous along K or not, `size` elements of `width` bytes in that dimension; the name is for messages.
    """
    if along_k:
        k1 = _VECTOR // width
        vector, columns = power_of_two(size, k1), k // k1
        rows = threads // columns if columns else 0
        if not columns or k % k1 or threads % columns or not rows or block % rows:
            raise Misfit(f"{name}: {threads} threads can't share {block} x {k} in vectors of {k1}")
        return {"k1": k1, "threads": (columns, rows, 1), "order": "S<1, 0, 2>", "dim": 2, "vector": vector, "store": k1}
    k1 = 4
    vector = power_of_two(size, _VECTOR // width)
    rows = min(threads, block // vector)
    columns = threads // rows if rows else 0
    if not rows or threads % rows or block % (rows * vector) or k % (k1 * columns):
        raise Misfit(f"{name}: {threads} threads can't share {block} x {k} in vectors of {vector} across K")
    return {"k1": k1, "threads": (columns, rows, 1), "order": "S<0, 2, 1>", "dim": 1, "vector": vector, "store": k1}


def shape(config: Config, problem: Problem) -> dict[str, Any]:
    """Return the template parameters of an instance."""
    fitted = _fitted(config, problem)
    schedule = "Interwave" if config.option("interwave") else "Intrawave"
    usual = {"padding": padding(config, problem), "schedule": schedule, "pipeline": config.option("pipeline", 1)}
    return usual | fitted


def _fitted(config: Config, problem: Problem) -> dict[str, Any]:
    """Return `shape` without what fits any problem, so that only the relevant part of a config is read."""
    form = config.template.removesuffix(SHUFFLED)
    if is_shuffled(config) != (problem.b.order != PLAIN):
        raise Misfit(f"template {config.template} does not read B in the order {problem.b.order}")
    if (form == "mx") != (problem.a.type.packed > 1):
        raise Misfit(f"template {config.template} does not read {problem.a.dtype}")
    if (form == "ab_scale") != (scales(problem) == block_scales(problem)):
        raise Misfit(f"template {config.template} does not apply the scales of {problem.key}")
    found = {"mx": _mx_shape, "ab_scale": _block_scaled_shape}.get(form, _plain_shape)(config, problem)
    return _with_shuffled_b(config, problem, found) if is_shuffled(config) else found


def is_shuffled(config: Config) -> bool:
    """Say whether an instance reads B in AITER's shuffled layout."""
    return config.template.endswith(SHUFFLED)


def _with_shuffled_b(config: Config, problem: Problem, found: dict[str, Any]) -> dict[str, Any]:
    """Return the template parameters of an instance that reads B in AITER's order; complete blocks along N and K."""
    if found["xdl"] != _SHUFFLED_SIDE or config.split_k > 1:
        raise Misfit(f"B in the order {problem.b.order} is for instructions of {_SHUFFLED_SIDE}, K is not split")
    if problem.n % config.block_n or problem.k % config.block_k:
        sizes, blocks = f"N {problem.n} and K {problem.k}", f"{config.block_n} and {config.block_k}"
        raise Misfit(f"{sizes} must be multiples of {blocks} for B in the order {problem.b.order}")
    layout = _SHUFFLED_LAYOUTS.get(config.template.removesuffix(SHUFFLED), "Col")
    if layout == "Col" and config.option("pipeline") == 3 and found["repeats"][0] < _SHUFFLED_REPEATS:
        raise Misfit(f"pipeline v3 of {config.template} wants {_SHUFFLED_REPEATS} instructions of a wave along M")
    return found | {"b": found["b"] | {"layout": layout}}


def block_scales(problem: Problem) -> tuple[Scaling, Scaling]:
    """Return the scales that template ab_scale applies; those of A are stored by groups if B is shuffled."""
    layout = "rows" if problem.b.order == PLAIN else "groups"
    return Scaling(depth=SCALED_BLOCK, layout=layout), Scaling(rows=SCALED_BLOCK, depth=SCALED_BLOCK)


def scales(problem: Problem) -> tuple[Scaling | None, Scaling | None]:
    """Return the scale factors of A and of B."""
    return problem.a.scaling, problem.b.scaling


def _block_scaled_shape(config: Config, problem: Problem) -> dict[str, Any]:
    """Return the template parameters of an instance for fp8 with scales of 1 x 128 of A and 128 x 128 of B."""
    n, k = config.block_n, config.block_k
    if k % SCALED_BLOCK or problem.k % k or config.split_k > 1:
        raise Misfit(f"K {problem.k} must be a multiple of {k}, that of {SCALED_BLOCK}, and is not split")
    if config.option("pipeline", 1) != 1 and max(n, k) > SCALED_BLOCK:
        raise Misfit(f"pipeline v{config.option('pipeline')} has one scale of B for a block, not for {n} x {k}")
    return _plain_shape(config, problem) | {"scale_block": (1, SCALED_BLOCK, SCALED_BLOCK)}


def _plain_shape(config: Config, problem: Problem) -> dict[str, Any]:
    """Return the template parameters of an instance whose scales, if any, the epilogue applies."""
    m, n, k = config.tile
    xdl, threads = config.option("xdl", 16), config.num_warps * WAVE
    wave_m = config.option("wave_m", 1)
    wave_n = config.num_warps // wave_m
    if wave_m * wave_n != config.num_warps or m % (wave_m * xdl) or n % (wave_n * xdl):
        raise Misfit(f"{wave_m} x {config.num_warps}/{wave_m} waves of {xdl} x {xdl} don't tile {m} x {n}")
    lead_a, lead_b, _ = problem.leads
    a = operand("A", m, k, problem.a.row_major, lead_a, problem.a.type.bytes, threads)
    b = operand("B", n, k, not problem.b.row_major, lead_b, problem.b.type.bytes, threads)
    repeats = m // (wave_m * xdl), n // (wave_n * xdl)
    shuffle = 2 if repeats[1] % 2 == 0 else 1
    return {
        "tile": config.tile,
        "threads": threads,
        "xdl": xdl,
        "repeats": repeats,
        "shuffle": shuffle,
        "a": a | {"layout": "Row" if problem.a.row_major else "Col"},
        "b": b | {"layout": "Row" if problem.b.row_major else "Col"},
        "c": result(problem, threads, wave_m * xdl, wave_n * xdl * shuffle),
    }


def _mx_shape(config: Config, problem: Problem) -> dict[str, Any]:
    """Return the template parameters of an instance for fp4 with scales: 32 rows or columns and 256 along K share
    words of scales, and what is beyond M and N is never read.
    """
    m, n, k = config.tile
    threads, wave_m = config.num_warps * WAVE, config.option("wave_m", 1)
    wave_n = config.num_warps // wave_m
    if wave_m * wave_n != config.num_warps or m % (wave_m * _MX_SIDE) or n % (wave_n * _MX_SIDE):
        raise Misfit(f"{wave_m} x {config.num_warps}/{wave_m} waves of {_MX_SIDE} x {_MX_SIDE} don't tile {m} x {n}")
    if config.split_k > 1:  # an emulator finds every split but the first reading beyond them
        raise Misfit("split-K of fp4: the library finds the scales of the first split only")
    if problem.k % k or k % _MX_DEPTH or problem.n % _MX_SIDE:
        raise Misfit(f"K {problem.k} must be a multiple of {k}, that of {_MX_DEPTH}, and N {problem.n} of {_MX_SIDE}")
    sides = [operand(x, b, k // 2, True, problem.k // 2, 1, threads) for x, b in (("A", m), ("B", n))]
    return {
        "tile": (m, n, k // 2),
        "threads": threads,
        "xdl": 16,
        "repeats": (m // (wave_m * 16), n // (wave_n * 16)),
        "group": 32,
        "a": sides[0] | {"layout": "Row"},
        "b": sides[1] | {"layout": "Col"},
        "c": result(problem, threads, wave_m * _MX_SIDE, wave_n * _MX_SIDE),
        "padding": "Default",
        "schedule": "Intrawave",
        "pipeline": config.option("pipeline", 1),
    }


def result(problem: Problem, threads: int, high: int, wide: int) -> dict[str, Any]:
    """Return how threads copy a part of C, `high` rows of `wide` columns, from LDS to memory."""
    vector = power_of_two(problem.n, _VECTOR // problem.c.type.bytes)
    across = min(threads, wide // vector)
    down = threads // across
    if high % down:  # fewer columns each, so that all threads have a row
        across = cdiv(threads, high)
        down = threads // across
        vector = min(vector, wide // across)
    if threads % across or high % down or wide % (across * vector):
        raise Misfit(f"C: {threads} threads can't share {high} x {wide} in vectors of {vector}")
    return {"threads": (1, down, 1, across), "vector": vector}


def padding(config: Config, problem: Problem) -> str:
    """Return the dimensions in which the kernel must handle partial tiles."""
    if problem.k % (config.block_k * config.split_k):
        return "MNKPadding"
    return "MNPadding" if problem.m % config.block_m or problem.n % config.block_n else "Default"


def preference(config: Config) -> tuple[int, ...]:
    """Return the sort key of instances of one tile: deepest register prefetch first, then waves in a square."""
    wave_m = config.option("wave_m", 1)
    return (
        (3, 4, 5, 1).index(config.option("pipeline")),
        abs(wave_m - config.num_warps // wave_m),
        -config.option("xdl"),
    )


def _divides(config: Config, problem: Problem, target: Target) -> str | None:
    try:
        _fitted(config, problem)
    except Misfit as misfit:
        return str(misfit)
    return None


def _lds(config: Config, problem: Problem, target: Target) -> str | None:
    rows = config.block_m * problem.a.type.bytes + config.block_n * problem.b.type.bytes
    buffers = _BUFFERS.get(config.option("pipeline"), 1)
    if is_shuffled(config):  # A alone, in two buffers
        rows, buffers = config.block_m * problem.a.type.bytes, 2
    used = rows * config.block_k // problem.a.type.packed * buffers
    return f"LDS {used} > {target.lds_bytes}" if used > target.lds_bytes else None


def _accumulators(config: Config, problem: Problem, target: Target) -> str | None:
    held = config.block_m * config.block_n // (config.num_warps * WAVE)
    return f"{held} accumulators > {_MOST_ACCUMULATORS}" if held > _MOST_ACCUMULATORS else None


def _loops(config: Config, problem: Problem, target: Target) -> str | None:
    version = config.option("pipeline", 1)
    if version not in PREFETCHED:
        return f"pipeline v{version}; there are {', '.join(f'v{v}' for v in PREFETCHED)}"
    loops = cdiv(problem.k, config.block_k * config.split_k)
    ahead = _SHUFFLED_AHEAD if is_shuffled(config) else PREFETCHED[version]
    return f"{loops} K blocks for pipeline v{version}, which wants {ahead + 1}" if loops <= ahead else None


def _arrays(config: Config, problem: Problem, target: Target) -> str | None:
    """Refuse pipeline v5 with operands read across K: its arrays stay in scratch (2 KB a thread), and
    it was not seen to work.
    """
    if config.option("pipeline") != 5 or problem.layout == "TN":
        return None
    return f"pipeline v5 with layout {problem.layout}, whose arrays end up in scratch"


def _waves(config: Config, problem: Problem, target: Target) -> str | None:
    """Keep two workgroups that take turns on a compute unit for the simplest pipeline, which alone has that form."""
    if not config.option("interwave"):
        return None
    return "interwave is of pipeline v1 alone" if config.option("pipeline") != 1 else None


def _split(config: Config, problem: Problem, target: Target) -> str | None:
    """Refuse splits of a narrow C, into which they add in its own type, or with a bias, which each would add."""
    if config.split_k == 1:
        return None
    if problem.bias != "none":
        return "split-K adds the bias in every split"
    return None if problem.c.dtype in ("bf16", "fp16", "fp32") else f"split-K can't add into {problem.c.dtype}"


def _bank(config: Config, problem: Problem, target: Target) -> str | None:
    """Keep matrix instructions of 32 for tiles of 64, and those of 16 for few of them."""
    if config.template != "universal" or config.option("xdl") == 32 or min(config.block_m, config.block_n) < 128:
        return None
    return f"16 x 16 instructions for a {config.block_m} x {config.block_n} tile"


RULES = (
    Rule("pipeline", _loops),
    Rule("scratch", _arrays),
    Rule("interwave", _waves),
    Rule("split", _split),
    Rule("lds", _lds),
    Rule("accumulators", _accumulators),
    Rule("instruction", _bank),
    Rule("threads", _divides),
)
