"""Measures the main loop of a kernel in its assembly, AMD's or NVIDIA's PTX."""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tritongemm.core.artifact import LoopFacts

# A label, or an instruction with its predicate (PTX) and operands.
_LINE = re.compile(r"^(?:[ \t]*([$.\w]+):(?:\s|$)|[ \t]+(@!?%?\w+[ \t]+)?([a-z][\w.:]+)[ \t]*([^;\n]*))", re.MULTILINE)
_JUMPS = re.compile(r"s_cbranch_|s_branch$|bra(?:$|\.)")
_ENDS = re.compile(r"s_branch$|s_endpgm|s_setpc|bra(?:$|\.)|ret$|exit$")
_TARGET = re.compile(r"[$.\w]+$")
_MATRIX = re.compile(r"v_s?(?:mfma|wmma)|v_swmmac|mma\.|wgmma\.mma|tcgen05\.mma")
_LOADS = re.compile(r"(?:buffer|global|flat)_load|tensor_load|ld\.global|cp\.async\.(?:c[ag]|bulk\.tensor\S*global)")
_STORES = re.compile(r"(?:buffer|global|flat)_(?:store|atomic)|scratch_")
_SCRATCH = re.compile(r"scratch_(?:load|store)")
_WAITS = re.compile(r"s_waitcnt$|s_wait_(?:load|async|tensor)cnt|cp\.async\.wait_group")
_LEFT = re.compile(r"vmcnt\((\d+)\)|^(0x[0-9a-f]+|\d+)$")  # loads that may still be under way, or groups of them
_PTX = re.compile(r"^\.version ", re.MULTILINE)  # registers are spilled later
_GROUP = "cp.async.commit_group"
_KINDS = ("async", "tensor", "")  # of loads, by the names of their instructions and waits: each is counted apart
_WIDTH = re.compile(r"x(\d)$|(?:_[biu]|\.[bfsu])(\d+)$")
_WIDE, _NARROW = 16, 4  # bytes
_ROUNDS = 8  # iterations after which waits find the same loads under way as in the next ones


class _Instruction(NamedTuple):
    op: str
    of: str
    skipped: bool  # whether it has a predicate, so that it may do nothing


def measure(assembly: str) -> LoopFacts | None:
    """Return what the main loop of a kernel has; None where no loop multiplies or loads."""
    code, places = _read(assembly)
    bodies = [[code[i] for i in sorted(body)] for body in _innermost(code, places)]
    best = max(bodies, key=lambda body: (_count(_MATRIX, body), _count(_LOADS, body)), default=None)
    if best is None:
        return None
    drains, ahead = _follow(best)
    return LoopFacts(
        instructions=len(best),
        matrix=_count(_MATRIX, best),
        loads=_count(_LOADS, best),
        narrow=sum(_bytes(step) < _NARROW for step in best if _LOADS.match(step.op)),
        spilled=None if _PTX.search(assembly) else sum(_bytes(step) for step in best if _SCRATCH.match(step.op)),
        drains=drains,
        ahead=ahead,
    )


def _read(assembly: str) -> tuple[list[_Instruction], dict[str, list[int]]]:
    """Return the instructions, and which ones follow each label: PTX has some again in other braces."""
    code: list[_Instruction] = []
    places: dict[str, list[int]] = {}
    for label, predicate, op, of in _LINE.findall(assembly):
        if label:
            places.setdefault(label, []).append(len(code))
        else:
            code.append(_Instruction(op, of.strip(), bool(predicate)))
    return code, places


def _innermost(code: Sequence[_Instruction], places: dict[str, list[int]]) -> list[set[int]]:
    """Return the places of each loop that multiplies or loads and contains no other such loop.

    A jump backwards closes a loop if it can be reached again from where it leads to, by instructions in between.
    """
    before: list[list[int]] = [[] for _ in code]
    backward = list[tuple[int, int]]()
    for i, step in enumerate(code):
        target = _TARGET.search(step.of) if _JUMPS.match(step.op) else None
        named = places.get(target[0], []) if target else []
        to = max((place for place in named if place <= i), default=min(named, default=len(code)))
        if to < len(code):
            before[to].append(i)
            backward += [(to, i)] if to <= i else []
        if i + 1 < len(code) and (step.skipped or not _ENDS.match(step.op)):
            before[i + 1].append(i)
    loops: dict[int, set[int]] = {}
    for head, last in backward:
        body, paths = set[int](), [last]
        while paths:
            at = paths.pop()
            if head <= at <= last and at not in body:
                body.add(at)
                paths += before[at]
        if head in body:
            loops.setdefault(head, set()).update(body)
    works = [b for b in loops.values() if any(_MATRIX.match(code[i].op) or _LOADS.match(code[i].op) for i in b)]
    return [b for b in works if not any(other < b for other in works)]


def _follow(body: Sequence[_Instruction]) -> tuple[int, float | None]:
    """Return an iteration's waits that leave no load under way, and the least iterations from a load to its wait.

    Loads arrive in the order in which they were issued: a wait that leaves n under way waits for all but the last n.
    Stores count as loads do; PTX counts groups of loads.
    """
    groups = any(step.op == _GROUP for step in body)
    issued = {kind: deque[float]() for kind in _KINDS}
    drains, ahead = 0, float("inf")
    for turn in range(_ROUNDS):
        drains = 0
        for place, step in enumerate(body):
            now, under_way = turn + place / len(body), issued[next(k for k in _KINDS if k in step.op)]
            if step.op == _GROUP or (not groups and _LOADS.match(step.op)):
                under_way.append(now)
            elif not groups and _STORES.match(step.op):
                under_way.append(float("-inf"))
            elif _WAITS.match(step.op) and (found := _LEFT.search(step.of)):
                left = int(found[1] or found[2], 0) >> (8 if "dscnt" in step.op else 0)
                drains += left == 0
                while len(under_way) > left:
                    ahead = min(ahead, now - under_way.popleft())
    return drains, round(ahead, 2) if ahead < float("inf") else None


def _count(what: re.Pattern[str], body: Sequence[_Instruction]) -> int:
    return sum(1 for step in body if what.match(step.op))


def _bytes(step: _Instruction) -> int:
    """Return the bytes that a load, or an access to scratch, moves for a thread."""
    if step.op.startswith(("cp.async", "tensor_load")):
        return _WIDE  # or their last bytes, where a row ends
    words = re.search(r"\.v(\d)\.", step.op)
    if not (found := _WIDTH.search(step.op)):
        return 1 if "byte" in step.op else 2 if "short" in step.op else 4
    return 4 * int(found[1]) if found[1] else int(found[2]) // 8 * (int(words[1]) if words else 1)
