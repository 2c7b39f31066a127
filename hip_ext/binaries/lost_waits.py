"""Finds barriers of gfx9 assembly that a wave can reach before its own stores into LDS have landed.

LLVM as Triton 3.9 has it relaxes the wait of a release fence before it has seen all paths to it: loops for gfx950 were
left with a wait for nothing, or for loads alone, before a barrier, while stores of the iteration before were under way.
Barriers without any wait order nothing in LDS: schedules that let waves take turns have them on purpose.
"""

import re
from typing import NamedTuple

_LANDED = 15  # the largest number of a counter of LDS operations, at which no wait is one
_STEP = re.compile(
    r"^(?:(?P<label>[.$\w]+):|\s+(?P<op>ds_\w+|s_waitcnt|s_c?branch\w*|s_endpgm|s_setpc\w*)\b[ \t]*(?P<of>[^;\n]*)"
    r"(?:;.*)?(?P<barrier>\n\s+s_barrier\b)?)",
    re.MULTILINE,
)
_READS = ("ds_read", "ds_permute", "ds_bpermute", "ds_swizzle", "ds_nop")
_LDS_COUNT = re.compile(r"lgkmcnt\((\d+)\)")


class _Step(NamedTuple):
    """A relevant instruction, its operands, and whether a barrier follows it directly."""

    op: str
    of: str
    barrier: bool


def loses_a_wait(assembly: str) -> bool:
    """Return whether a wave can reach a barrier, behind a wait, before its stores into LDS have landed.

    LDS operations end in order, so the number issued after the last store is followed along all paths, the least
    counting.
    """
    steps, places = _read(assembly)
    issued: dict[int, int] = {}  # by step, LDS operations since the last store; _LANDED: no store is under way
    paths = [(0, _LANDED)]
    while paths:
        at, since = paths.pop()
        while at < len(steps) and since < issued.get(at, _LANDED + 1):
            issued[at] = since
            op, of, barrier = steps[at]
            at += 1
            if op == "s_waitcnt":
                count = _LDS_COUNT.search(of)
                since = _LANDED if count and int(count[1]) <= since else since
                if barrier and since < _LANDED:
                    return True
            elif op.startswith("s_cbranch"):
                paths.append((places.get(of, len(steps)), since))
            elif op == "s_branch":
                at = places.get(of, len(steps))
            elif not op.startswith("ds_"):
                break  # the program's end
            elif not op.startswith(_READS):
                since = 0
            elif since < _LANDED:
                since = min(since + 1, _LANDED - 1)
    return False


def _read(assembly: str) -> tuple[list[_Step], dict[str, int]]:
    """Return the steps that matter, and which step follows each label."""
    steps: list[_Step] = []
    places: dict[str, int] = {}
    for found in _STEP.finditer(assembly):
        if found["label"]:
            places[found["label"]] = len(steps)
        else:
            steps.append(_Step(found["op"], found["of"].strip(), bool(found["barrier"])))
    return steps, places
