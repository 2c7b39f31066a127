"""Varies cuBLASLt's algorithms, as its heuristics name eight at most.

Two ways: the heuristics are asked again with some of their choices forbidden, and each algorithm they name is changed
in one attribute at a time, as far as its capabilities go; of their tiles those that fill the device best come first.
The library itself checks every one of them for the problem.
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_int32, c_size_t, c_uint32
from itertools import chain

from tritongemm.core.errors import DriverError
from tritongemm.core.integers import cdiv
from tritongemm.hip_ext.blaslt.matmul import PreparedMatmul
from tritongemm.hip_ext.blaslt.tables import Algorithm, tiles

# cublasLtMatmulAlgoCapAttributes_t
_SPLIT_K, _REDUCTIONS, _SWIZZLE, _TILES, _CUSTOM_MOST, _STAGES = 0, 1, 2, 6, 7, 13
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
CLUSTERS = range(2, 17)  # all shapes of up to 16 blocks, powers of two
REDUCTIONS = (1, 2, 4)  # in place, in the compute type, in the output type
_EDGE = 32  # cost, in elements, of one more row or column of a tile


def read_capability(prepared: PreparedMatmul, algorithm: Algorithm, capability: int) -> int:
    """Return the value of an algorithm's capability, by the library's number; 0 where the library does not say."""
    value = c_int32(0)
    try:
        prepared.library.calls["MatmulAlgoCapGetAttribute"](
            algorithm.raw, capability, byref(value), 4, byref(c_size_t())
        )
    except DriverError:
        return 0
    return value.value


def read_capability_list(prepared: PreparedMatmul, algorithm: Algorithm, capability: int) -> list[int]:
    """Return the values of an algorithm's capability that is a list; empty where the library does not say."""
    get, written = prepared.library.calls["MatmulAlgoCapGetAttribute"], c_size_t()
    try:
        get(algorithm.raw, capability, None, 0, byref(written))
        values = (c_uint32 * (written.value // 4))()
        get(algorithm.raw, capability, byref(values), written.value, byref(written))
    except DriverError:
        return []
    return list(values)


def vary_attributes(prepared: PreparedMatmul, algorithm: Algorithm) -> Iterator[Mapping[str, int]]:
    """Yield the algorithm's attributes with one of them changed, except its tile; not all of them exist."""
    values = dict(algorithm.values)

    def changed(name: str, choices: Sequence[int]) -> Iterator[Mapping[str, int]]:
        yield from ({**values, name: choice} for choice in choices if choice != values[name])

    if read_capability(prepared, algorithm, _SPLIT_K):
        schemes = [r for r in REDUCTIONS if r & read_capability(prepared, algorithm, _REDUCTIONS)]
        for split in SPLITS:
            for scheme in schemes if split > 1 else [0]:
                if (split, scheme) != (values["splitk"], values["reduction"]):
                    yield {**values, "splitk": split, "reduction": scheme}
    if values["cluster"]:
        yield from changed("cluster", CLUSTERS)
    yield from changed("custom", range(read_capability(prepared, algorithm, _CUSTOM_MOST) + 1))
    yield from changed("swizzle", range(read_capability(prepared, algorithm, _SWIZZLE) + 1))
    yield from changed("stages", read_capability_list(prepared, algorithm, _STAGES))


def vary_tile(prepared: PreparedMatmul, seeds: Sequence[Algorithm], units: int) -> Iterator[Mapping[str, int]]:
    """Yield the seeds' attributes with each tile that they can have, the least predicted time on `units` units first.

    256 x 28672 on 132 SMs is 224 tiles of 128 x 256, or 256 of 128 x 224: two rounds of either, but these are shorter.
    """
    shapes, d = tiles(), prepared.matmul.d

    def cost(tile: int) -> int:
        rows, cols = shapes[tile]
        rounds = cdiv(cdiv(d.rows, rows) * cdiv(d.cols, cols) * d.batch, units)
        return rounds * (rows * cols + _EDGE * (rows + cols))

    able = {seed.values: set(read_capability_list(prepared, seed, _TILES)) for seed in seeds}
    for tile in sorted(set().union(*able.values()) & shapes.keys(), key=cost):
        yield from ({**dict(s.values), "tile": tile} for s in seeds if tile in able[s.values])


def all_algorithms(prepared: PreparedMatmul, units: int) -> Iterator[Algorithm]:
    """Yield the algorithms of a matmul, the library's best guess first, on cuBLASLt followed by variants."""
    return vary_algorithms(prepared, units) if prepared.library.extension is None else iter(prepared.algorithms)


def vary_algorithms(prepared: PreparedMatmul, units: int) -> Iterator[Algorithm]:
    """Yield the algorithms of a matmul, those of the heuristics without split-K or workspace first, then variants.

    Each is made when it is drawn, since the library takes milliseconds to check a hundred.
    """
    found: dict[tuple[tuple[str, int], ...], Algorithm] = {}

    def new(algorithm: Algorithm | None) -> Iterator[Algorithm]:
        if algorithm is not None and algorithm.values not in found:
            found[algorithm.values] = algorithm
            yield algorithm

    for algorithm in prepared.algorithms:
        yield from new(algorithm)
    for mask, workspace in (
        (0, prepared.workspace),
        (1, prepared.workspace),
        (2, prepared.workspace),
        (4, prepared.workspace),
        (7, 0),
    ):
        for algorithm in prepared.heuristics(workspace, mask):
            yield from new(algorithm)
    first, others = list(found.values())[:1], list(found.values())[1:]
    changes = (
        *(vary_attributes(prepared, seed) for seed in first),
        vary_tile(prepared, [*first, *others], units),
        *(vary_attributes(prepared, seed) for seed in others),
    )
    for values in chain.from_iterable(changes):
        if tuple(values.items()) not in found:
            yield from new(prepared.rebuild(values))
