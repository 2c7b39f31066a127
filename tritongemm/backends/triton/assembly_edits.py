"""Edits of the assembly that Triton makes for NVIDIA GPUs: instructions that its language has no words for.

A template whose facts say ``edited`` leaves marks, comments in the assembly just before an instruction:

- ``wait``: no thread waits for the other threads of its warp group before it waits at this barrier.
- ``arrive``: each warp arrives by itself, where Triton makes all wait for each other and lets one thread arrive.
- ``arrive at both``: the same, at the barriers of both programs of a pair (a cluster of two).
- ``fetch for both``: the copy engine writes the block into the shared memory of both programs, and tells both.
- ``meet``: no program of a pair goes on before the other one's barriers are there.

The kernel is told by the constant EDITED that its marks count; without edits it is right too, and a little slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tritongemm.core.errors import UnavailableError

CONSTANT = "EDITED"
PROGRAMS = 2  # of a pair
_MARK = re.compile(r"// tritongemm: ([a-z ]+)\n")
_ENTRY = re.compile(r"\.entry [^{]*\{\n")
_MAKERS = 128  # threads that make the barriers; the others come to life when these are done
_GROUP_BARRIER = re.compile(r"\tbar\.sync\s+\d+, 128;\n")
_FIRST_LANE = ".reg .pred first; .reg .b32 there; mov.u32 there, %laneid; setp.eq.u32 first, there, 0;"
# Waits of the other warps of a program, which Triton starts later, are none: they have made nothing.
_OTHERS = (
    "\t{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x;"
    f" setp.ge.u32 other, thread, {_MAKERS}; @other barrier.cluster.arrive.relaxed; }}\n"
)
_MEET = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;\n"
_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"


class UnknownAssemblyError(UnavailableError):
    """An instruction that a mark announces is not there, as this version of Triton writes it in another way."""


def _same(found: re.Match[str]) -> str:
    return found[0]


def _arrive(found: re.Match[str]) -> str:
    return f"{{ {_FIRST_LANE} @first mbarrier.arrive.shared::cta.b64 _, [{found[1]}]; }}"


def _arrive_at_both(found: re.Match[str]) -> str:
    told = (
        f" mapa.shared::cluster.u32 there, {found[1]}, {n}; @first mbarrier.arrive.shared::cluster.b64 _, [there];"
        for n in range(PROGRAMS)
    )
    return f"{{ {_FIRST_LANE}{''.join(told)} }}"


def _fetch_for_both(found: re.Match[str]) -> str:
    return f"{{ .reg .b16 both; mov.b16 both, 3; {found[1]} {_COPY} {found[2]}, both; }}"


_ARRIVE = re.compile(r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[([^\],]*)\](?:, 1)?;")
# What a mark announces, and what stands there instead.
_EDITS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    "wait": (re.compile(r"mbarrier\.try_wait"), _same),
    "arrive": (_ARRIVE, _arrive),
    "arrive at both": (_ARRIVE, _arrive_at_both),
    "fetch for both": (
        re.compile(
            r"(@%p\d+) cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes"
            r" (\[[^\]]*\], \[[^\]]*\], \[[^\]]*\]);"
        ),
        _fetch_for_both,
    ),
}


def edit(assembly: str) -> str:
    """A kernel's PTX with its marks carried out.

    Args:
        assembly: as Triton's compiler made it, of one kernel.

    Raises:
        UnknownAssemblyError: what a mark announces is not there.
    """
    parts: list[str] = []
    at, meets = 0, False
    marks = list(_MARK.finditer(assembly))
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(assembly)], strict=True):
        parts.append(assembly[at : mark.start()])
        at = mark.end()
        if mark[1] == "meet":
            meets = True
            parts.append(_MEET)
            continue
        pattern, changed = _EDITS[mark[1]]
        found = pattern.search(assembly, at, end)
        if found is None:
            raise UnknownAssemblyError(f"Triton made no instruction to {mark[1]} behind a mark for it")
        parts += [_GROUP_BARRIER.sub("", assembly[at : found.start()]), changed(found)]
        at = found.end()
    parts.append(assembly[at:])
    text = "".join(parts)
    return _ENTRY.sub(lambda found: found[0] + _OTHERS, text) if meets else text


@contextmanager
def edits() -> Iterator[None]:
    """While this is entered, the assembly of what Triton compiles is edited at its marks."""
    import triton

    def add_edits(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
        if stages is not None:  # None: Triton asks what to call these edits in its cache
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: edit(make(source, metadata))
        return __name__, __name__

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = add_edits
        yield
