"""Tabulates the launches of a kernel at every M that it serves, as numbers that need only sums and quotients.

A number of a launch that changes with M (the grid, M itself, bytes of a workspace) is written in runs: from an M on it
begins at a value, and rises by an amount after every few M.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from tritongemm.core.errors import InputError
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.support import Support

_COUNTED = ("i32", "u32", "i64")  # kinds of parameters that are whole numbers


class Run(NamedTuple):
    """The values of a number from an M on: at M it is ``value + rise * ((M - start) // every)``."""

    start: int  # the first M
    value: int  # the number there
    rise: int = 0  # what is added after every `every` M
    every: int = 1  # M between two rises

    def at(self, m: int) -> int:
        """Return the number at an M, which is at least `start`."""
        return self.value + self.rise * ((m - self.start) // self.every)


@dataclass(frozen=True)
class LaunchTable:
    """A launch for each M of a range."""

    # low, high: the least and the largest M
    low: int
    high: int
    launch: Launch  # that of the largest M, with all buffers that any M needs; its path is empty
    # The numbers that change with M, by their names, e.g. `grid.0` or `params.6.value`.
    runs: Mapping[str, Sequence[Run]] = field(default_factory=dict)

    def at(self, m: int) -> Launch | Support:
        """Return the launch at an M, or why there is none."""
        if not self.low <= m <= self.high:
            return Support(f"the library holds its launches for M {self.low} to {self.high}, not {m}")
        numbers = {name: self._run(name, m).at(m) for name in self.runs}
        return _with_numbers(self.launch, numbers) if numbers else self.launch

    def most_bytes(self, buffer: str, most: int = 0) -> int:
        """Return the most bytes that a buffer such as ``workspace`` takes, up to some M; 0 for any M."""
        runs = self.runs.get(f"buffers.{buffer}")
        if runs is None:
            return sum(b.bytes for b in self.launch.buffers if b.name == buffer)
        last = most or self.high
        ends = [min(run.start - 1, last) for run in runs[1:]] + [last]
        spans = [(run, end) for run, end in zip(runs, ends, strict=True) if run.start <= end]
        return max(max(run.value, run.at(end)) for run, end in spans)

    def _run(self, name: str, m: int) -> Run:
        runs = self.runs[name]
        return runs[bisect_right(runs, m, key=lambda run: run.start) - 1]


def tabulate(launch_at: Callable[[int], Launch | Support], low: int, high: int, block: int) -> LaunchTable | Support:
    """Return the launches of a range of M as a table, or why no table can hold them.

    Numbers change with M or with its number of blocks, so a few M of a block are looked at, or all where these are on
    no line.
    """
    launches: dict[int, Launch] = {}
    values: list[dict[str, int]] = []

    def numbers(m: int) -> dict[str, int]:
        found = launches.get(m) or launch_at(m)
        if isinstance(found, Support):
            raise InputError(f"M {m}: {found}")
        launches[m] = found
        return numbers_of(found)

    try:
        for first in (low, *range((low - 1) // block * block + block + 1, high + 1, block)):
            last = min(high, (first - 1) // block * block + block)
            values += _between(numbers, first, last)
        shapes = {fixed_of(launch) for launch in launches.values()}
        if len(shapes) > 1:
            return Support("its launches differ in more than numbers from one M to another")
    except InputError as error:
        return Support(str(error))
    names = sorted(set().union(*values))
    series = {name: [one.get(name, 0) for one in values] for name in names}
    changing = {name: tuple(_runs(low, each)) for name, each in series.items() if len(set(each)) > 1}
    reserved = [n for n in reversed(names) if n.startswith("buffers.")]  # a workspace first, as backends have it
    buffers = tuple(Buffer(n[8:], max(series[n])) for n in reserved if max(series[n]))
    launch = replace(launches[high], path="", buffers=buffers)
    return LaunchTable(low, high, launch, changing)


def _between(numbers: Callable[[int], dict[str, int]], first: int, last: int) -> list[dict[str, int]]:
    """Return the numbers at each M of a block, interpolated where they are on a line."""
    seen = sorted({first, min(first + 1, last), (first + last) // 2, max(first, last - 1), last})
    found = {m: numbers(m) for m in seen}
    names = set().union(*found.values())
    begin = {name: found[first].get(name, 0) for name in names}
    slopes = {name: found[seen[1]].get(name, 0) - begin[name] if len(seen) > 1 else 0 for name in names}
    on_a_line = all(found[m].get(name, 0) == begin[name] + slopes[name] * (m - first) for m in seen for name in names)
    if on_a_line:
        return [{n: begin[n] + slopes[n] * (m - first) for n in names} for m in range(first, last + 1)]
    return [found.get(m) or numbers(m) for m in range(first, last + 1)]


def _runs(low: int, series: Sequence[int]) -> Iterable[Run]:
    """Yield the numbers of all M from the least on, as runs."""
    starts, at = list[tuple[int, int, int]](), low  # of equal numbers: where they begin, the number, how many
    for value, same in groupby(series):
        count = len(list(same))
        starts.append((at, value, count))
        at += count
    index = 0
    while index < len(starts):
        start, value, every = starts[index]
        rise, end = 0, index + 1
        while end < len(starts):
            step = starts[end][1] - starts[end - 1][1]
            last = end + 1 == len(starts)
            fits = starts[end - 1][2] == every and (starts[end][2] == every or (last and starts[end][2] < every))
            if not fits or (end > index + 1 and step != rise):
                break
            rise, end = step, end + 1
        yield Run(start, value, rise, every if rise else 1)
        index = end


def numbers_of(launch: Launch) -> dict[str, int]:
    """Return the whole numbers of a launch that may change with M, by their names."""
    found = {f"grid.{axis}": count for axis, count in enumerate(launch.grid)}
    for index, param in enumerate(launch.params):
        if param.kind in _COUNTED:
            found[f"params.{index}.value"] = int(param.value)
        if param.kind == "tma":
            found |= {f"params.{index}.shape.{side}": extent for side, extent in enumerate(param.shape)}
            found |= {f"params.{index}.stride": param.stride, f"params.{index}.box.0": param.box[0]}
    for kind, buffers in (("buffers", launch.buffers), ("zeroed", launch.zeroed)):
        found |= {f"{kind}.{buffer.name}": buffer.bytes for buffer in buffers}
    return found


def fixed_of(launch: Launch) -> Launch:
    """Return a launch in which all numbers that may change with M are at neutral values."""

    def fixed(p: Param) -> Param:
        return replace(p, value=0) if p.kind in _COUNTED else replace(p, shape=(0, 0), stride=0, box=(0, p.box[1]))

    params = map(fixed, launch.params)
    return replace(launch, grid=(1, 1, 1), params=tuple(params), buffers=(), zeroed=())


def _with_numbers(launch: Launch, numbers: Mapping[str, int]) -> Launch:
    """Return a launch with other numbers; the opposite of `numbers_of`. A buffer of no bytes is left out."""

    def buffers(kind: str, given: Sequence[Buffer]) -> tuple[Buffer, ...]:
        sized = (Buffer(b.name, numbers.get(f"{kind}.{b.name}", b.bytes)) for b in given)
        return tuple(b for b in sized if b.bytes)

    x, y, z = (numbers.get(f"grid.{axis}", count) for axis, count in enumerate(launch.grid))
    return replace(
        launch,
        grid=(x, y, z),
        params=tuple(_param(p, f"params.{index}", numbers) for index, p in enumerate(launch.params)),
        buffers=buffers("buffers", launch.buffers),
        zeroed=buffers("zeroed", launch.zeroed),
    )


def _param(param: Param, name: str, numbers: Mapping[str, int]) -> Param:
    if param.kind in _COUNTED:
        return replace(param, value=numbers.get(f"{name}.value", param.value))
    if param.kind != "tma":
        return param
    rows, columns = (numbers.get(f"{name}.shape.{side}", extent) for side, extent in enumerate(param.shape))
    stride, block = numbers.get(f"{name}.stride", param.stride), numbers.get(f"{name}.box.0", param.box[0])
    return replace(param, shape=(rows, columns), stride=stride, box=(block, param.box[1]))


def names_of(launch: Launch) -> frozenset[str]:
    """Return the names of the numbers of a launch that may change with M."""
    return frozenset(numbers_of(launch))
