"""Extends tables of launches beyond the M of a result, for calls of other M that its kernel serves too.

Numbers of launches go on as they did, up to where a grid has as many programs as the GPU holds, and stay the same
behind it. So the last runs of a table are continued as far as launches at some M bear them out; there they are looked
at anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tritongemm.core.launch import Buffer, Launch
from tritongemm.core.support import Support
from tritongemm.export.library.launch_table import LaunchTable, Run, fixed_of, numbers_of, tabulate

_LOOKED_AT = 4  # blocks of M that show how numbers go on
_MOST_PIECES = 8  # which a table has where launches are regular


def widen(table: LaunchTable, launch_at: Callable[[int], Launch | Support], block: int, most: int) -> LaunchTable:
    """Return a table of more M, up to where launches are regular.

    Args:
        table: of the least M on.
        launch_at: the launch at an M, or why there is none.
        block: rows of a tile.
        most: the largest M that is asked for.
    """
    pieces = [table]
    while True:
        last = pieces[-1]
        pieces[-1] = last = replace(last, high=_reach(last, launch_at, block, most))
        if last.high == most or len(pieces) == _MOST_PIECES:
            return _joined(pieces)
        following = tabulate(launch_at, last.high + 1, min(most, last.high + _LOOKED_AT * block), block)
        if isinstance(following, Support) or fixed_of(following.launch) != fixed_of(table.launch):
            return _joined(pieces)
        pieces.append(following)


def _reach(table: LaunchTable, launch_at: Callable[[int], Launch | Support], block: int, most: int) -> int:
    """Return the largest M up to which a table's last runs hold."""
    wanted = fixed_of(table.launch)

    def differs(m: int) -> bool:
        launch = launch_at(m)
        if isinstance(launch, Support) or fixed_of(replace(launch, path="")) != wanted:
            return True
        numbers, found = _continued(table, m), numbers_of(launch)
        return any(numbers.get(name, 0) != found.get(name, 0) for name in numbers.keys() | found.keys())

    reached = table.high
    for m in _samples(table.high, block, most):
        if differs(m):
            between = range(reached + 1, m + 1)
            return reached + bisect_left(between, True, key=differs)
        reached = m
    return reached


def _samples(high: int, block: int, most: int) -> Iterator[int]:
    """Yield some M above one, ascending: those around the beginnings of blocks, ever farther apart."""
    near, step = high, block
    seen = {most}
    while near < most:
        first = (near // block + 1) * block
        seen |= {near + 1, first - 1, first, first + 1}
        near, step = near + step, step * 2
    yield from sorted(m for m in seen if high < m <= most)


def _continued(table: LaunchTable, m: int) -> dict[str, int]:
    """Return the numbers of a launch at an M above a table's, as its last runs go on."""
    constant = {name: number for name, number in numbers_of(table.launch).items() if name not in table.runs}
    return constant | {name: runs[-1].at(m) for name, runs in table.runs.items()}


def _joined(pieces: Sequence[LaunchTable]) -> LaunchTable:
    """Return one table of tables that follow each other."""
    first, last = pieces[0], pieces[-1]
    every = [{b.name: max(b.bytes, piece.most_bytes(b.name)) for b in piece.launch.buffers} for piece in pieces]
    names = dict.fromkeys(name for buffers in every for name in buffers)
    buffers = tuple(Buffer(name, max(one.get(name, 0) for one in every)) for name in names)
    launch = replace(first.launch, buffers=buffers)
    runs: dict[str, tuple[Run, ...]] = {}
    for name in sorted(set().union(*(numbers_of(piece.launch) for piece in pieces))):
        found = [run for piece in pieces for run in _runs_of(piece, name)]
        if len(found) > len(pieces) or len({(run.value, run.rise) for run in found}) > 1 or found[0].rise:
            runs[name] = tuple(found)
    return LaunchTable(first.low, last.high, launch, runs)


def _runs_of(table: LaunchTable, name: str) -> Sequence[Run]:
    """Return the runs of a number, also of one that does not change."""
    return table.runs.get(name) or (Run(table.low, numbers_of(table.launch).get(name, 0)),)
