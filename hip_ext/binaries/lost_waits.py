"""Finds barriers of gfx9 assembly that a wave can reach before its own stores into LDS have landed.

LLVM as Triton 3.9 has it relaxes the wait of a release fence before it has seen all paths to it: on gfx950 a loop with
scales along K was left with a wait for nothing before its barrier, while stores of the iteration before were under way.
Barriers without any wait order nothing in LDS: schedules that let waves take turns have them on purpose.
"""

from __future__ import annotations

import re

_FOR_NOTHING = "vmcnt(63) expcnt(7) lgkmcnt(15)"  # every counter's largest number: what a relaxed wait is printed as
_LANDED = 15  # the largest number of a counter of LDS operations, at which no wait is one
_STEP = re.compile(
    r"^(?:(?P<label>[.$\w]+):"
    r"|\s+(?P<op>ds_\w+|s_waitcnt|s_barrier|s_c?branch\w*|s_endpgm|s_setpc\w*)\b[ \t]*(?P<of>[^;\n]*))",
    re.MULTILINE,
)
_READS = ("ds_read", "ds_permute", "ds_bpermute", "ds_swizzle", "ds_nop")
_LDS_COUNT = re.compile(r"lgkmcnt\((\d+)\)")


def loses_a_wait(assembly: str) -> bool:
    """Whether a wave can reach a barrier, behind a wait for nothing, before its stores into LDS have landed.

    LDS operations of a wave end in order: a store has landed where a wait leaves no more of them under way than were
    issued after the last store. That number is followed along all paths, the smallest where paths meet.

    Args:
        assembly: of one kernel, as LLVM prints it.
    """
    if _FOR_NOTHING not in assembly:
        return False
    steps, places = _read(assembly)
    issued: dict[int, int] = {}  # by step, LDS operations since the last store; _LANDED: no store is under way
    paths = [(0, _LANDED)]
    while paths:
        at, since = paths.pop()
        while at < len(steps) and since < issued.get(at, _LANDED + 1):
            issued[at] = since
            op, of = steps[at]
            at += 1
            if op == "s_waitcnt":
                count = _LDS_COUNT.search(of)
                since = _LANDED if count and int(count[1]) <= since else since
            elif op == "s_barrier":
                if since < _LANDED and at > 1 and steps[at - 2] == ("s_waitcnt", _FOR_NOTHING):
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


def _read(assembly: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The steps that matter, each an instruction and its operands, and which step follows each label."""
    steps: list[tuple[str, str]] = []
    places: dict[str, int] = {}
    for found in _STEP.finditer(assembly):
        if found["label"]:
            places[found["label"]] = len(steps)
        else:
            steps.append((found["op"], found["of"].strip()))
    return steps, places
