"""Shortens what Triton puts around the roles of a kernel's warps, in its PTX.

Triton's warps meet twice before their roles begin and twice when all are done, as another part of the kernel might
follow. Where none does, one meeting is enough: that behind which the warps' roles and the barriers in shared memory are
there. Roles then end by themselves, and a program leaves its compute unit as soon as its last store is read.
"""

import re

_MEET = r"\tbarrier\.sync \t1;\n"
_TAKE = r"\tsetmaxnreg\.\w+\.sync\.aligned\.u32 \t\d+;\n"
_WRITE = r"(?:\tst\.shared\.\S+ \t\[global_smem\+\d+\], [^;]*;\n)+"
_GONE = "\tret;\n"
# Of the first warps: what they do before their role, for which they take more registers than that has; and behind it.
_FIRST = re.compile(
    rf"{_TAKE}(?P<made>(?:(?!\tsetmaxnreg)[^\n]*\n)*?{_WRITE}{_MEET}\tsetmaxnreg\.)"
    rf"dec(?P<taken>\S+ \t(?P<registers>\d+);\n){_MEET}"
)
_LAST = re.compile(_MEET + _TAKE + _WRITE + _MEET)
_IDLE = re.compile(f"({_TAKE}){_MEET}{_MEET}{_TAKE}")  # of warps without work
_END = re.compile(_MEET + _TAKE)
_FIND = r"(?!(?:[^\n]*\n){0,3}[^\n]*ld\.shared\.b8)"  # not where warps read which role they have
_BEGIN = re.compile(f"({_TAKE}){_MEET}{_FIND}")
_HELD = re.compile(r"\.maxnreg (\d+)")  # registers of a thread at the start
_MEETINGS = 4  # that are left: of the first warps and of the others, and two of a role that no warp has


def shorten(assembly: str) -> str:
    """Return a kernel's PTX with short ways into and out of its roles; unchanged where Triton writes it otherwise."""
    held, taken = _HELD.search(assembly), _FIRST.search(assembly)
    if not (held and taken and int(taken["registers"]) > int(held[1])):
        return assembly
    short, last = _LAST.subn("", assembly)
    short = _FIRST.sub(r"\g<made>inc\g<taken>", short, count=1)
    short = _IDLE.sub(rf"\1{_GONE}", short)
    # The first warps' own meeting is one of those that are left.
    head, met, roles = short.partition("\tbarrier.sync \t1;\n\tsetmaxnreg.inc")
    short = _END.sub(_GONE, head) + met + _END.sub(_GONE, roles)
    short = _BEGIN.sub(r"\1", short)
    return short if (last, len(re.findall(_MEET, short))) == (1, _MEETINGS) else assembly
