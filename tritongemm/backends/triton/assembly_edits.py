"""Replaces marked instructions of a kernel's PTX with ones that Triton's language can't express, while it compiles.

A template whose facts say ``edited`` leaves marks, comments in the assembly just before an instruction:

- ``alone``: no thread waits for the others of its warp group before it makes this barrier, waits or arrives at it, or
  starts this product, or stores into a place that nothing reads.
- ``arrive``: each warp arrives, where Triton lets one thread of the group arrive for all.
- ``arrive at both``: the same, at the barriers of both programs of a pair (a cluster of two).
- ``fetch for both``: up to ``fetched``, the copy engine writes what it copies, in one piece or several, into the shared
  memory of both programs, and stores both.
- ``expected``: the barrier expects as many bytes as the register ``expected`` says, where blocks are fetched in part.
- ``into L2``: up to ``fetched``, the copy engine brings what it would copy into the last-level cache alone.
- ``columns N``: products have N columns of the wider block that Triton has.
- ``apart N``: blocks that the number in this register finds in shared memory are N bytes apart, fewer than Triton has.
- ``send``: up to ``sent``, stores into shared memory go to another program of the cluster, the one whose rank is in the
  register ``receiver``. The mbarrier of the first arrival behind the mark counts their bytes there; that arrival itself
  is left out.
- ``received``: the wait behind it acquires what other programs of the cluster have written.
- ``meet``: no program of a cluster goes on before the others' barriers are there.
- ``roles end alone``: the kernel ends with the roles of its warps, so that what is around them can be shorter
  (`role_frames`).
- ``next slot ahead``: loops find the addresses of the next block while products of this one run (`next_slots`).
- ``newest assembler``: the kernel is assembled by the newest assembler that Triton has, of the same major version of
  CUDA as the one that it would use. From CUDA 12.9 on, one lets the additions of one warp alternate with the products
  of others, from which not all kernels gain.

The constant EDITED says that a kernel's marks count; without edits it is correct too, and a little slower.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tritongemm.backends.triton.next_slots import find_ahead
from tritongemm.backends.triton.role_frames import shorten
from tritongemm.core.errors import UnavailableError

CONSTANT = "EDITED"
_PROGRAMS = 2  # of a pair
_MARK = "// tritongemm: "
_ROLES = f"{_MARK}roles end alone\n"
_SLOTS = f"{_MARK}next slot ahead\n"
_NEWEST = "// by the newest assembler\n"
_ENTRY = re.compile(r"\.entry [^{]*\{\n")
_MAKERS = 128  # threads that make the barriers; the others come to life when these are done
_GROUP_BARRIER = re.compile(r"\tbar\.sync\s+\d+, 128;\n")
_FIRST = "first_of_warp"
# Whether a thread is its warp's first, found once at the start: reading its number takes so long that the matrix
# instruction behind an arrival would wait for it.
_FIND_FIRST = f"\t.reg .pred {_FIRST}; {{ .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 {_FIRST}, lane, 0; }}\n"
# A cluster's barrier counts all threads. Warps that Triton starts later have made no barriers: they arrive at once, and
# only the first ones wait.
_OTHERS = (
    "\t{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x;"
    f" setp.ge.u32 other, thread, {_MAKERS}; @other barrier.cluster.arrive.relaxed; }}\n"
)
_MEET = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;\n"
_RECEIVER = "receiver"
_EXPECTED = "expected"
_SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
_PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global"
_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"


class UnknownAssemblyError(UnavailableError):
    """An instruction that a mark announces is not there, as this version of Triton writes it in another way."""


def _behind(mark: str, instruction: str, other_marks: bool = False) -> re.Pattern[str]:
    """Return the pattern from a mark to the instruction that it announces; other marks may be between."""
    between = ".*?" if other_marks else f"(?:(?!{_MARK}).)*?"
    return re.compile(rf"{_MARK}{mark}\n(?P<between>{between}){instruction}", re.DOTALL)


def _arrive(found: re.Match[str]) -> str:
    # Triton's predicate, which picks one thread of the group, is left out: the first one of each warp arrives.
    return f"{found['between']}@{_FIRST} mbarrier.arrive.shared::cta.b64 _, [{found['address']}];"


def _arrive_at_both(found: re.Match[str]) -> str:
    instructions = (
        f" mapa.shared::cluster.u32 there, {found['address']}, {n};"
        f" @{_FIRST} mbarrier.arrive.shared::cluster.b64 _, [there];"
        for n in range(_PROGRAMS)
    )
    return f"{found['between']}{{ .reg .b32 there;{''.join(instructions)} }}"


def _copy_for_both(found: re.Match[str]) -> str:
    copy = f"{found['when']} {_COPY} {found['operands']}, both;"
    return f"{{ .reg .b16 both; mov.b16 both, 3; {copy} }}"


def _fetch_for_both(found: re.Match[str]) -> str:
    changed, copies = _FETCH.subn(_copy_for_both, found["between"])
    return changed if copies else found[0]


def _fetch_into_cache(found: re.Match[str]) -> str:
    changed, copies = _FETCH.subn(lambda copy: f"{copy['when']} {_PREFETCH} {copy['from']};", found["between"])
    return changed if copies else found[0]


def _store_there(found: re.Match[str]) -> str:
    # The address is mapped anew for each store: the assembler merges equal mappings.
    there = f"mapa.shared::cluster.u32 there, {found['base']}, {_RECEIVER};"
    return f"{{ .reg .b32 there; {there} {_SEND} [there{found['offset'] or ''}], {found['values']}, [counter]; }}"


def _send(found: re.Match[str]) -> str:
    arrival = re.search(_ARRIVE, found["between"])
    if not arrival:
        return found[0]
    find = f"{{ .reg .b32 counter; mapa.shared::cluster.u32 counter, {arrival['address']}, {_RECEIVER};"
    between = _GROUP_BARRIER.sub("", found["between"].replace(arrival[0], find))
    sent, stores = _STORE.subn(_store_there, between)
    # A store of another form would stay in this program's memory, and the receiver would wait for ever.
    return f"{sent}}}" if stores and "st.shared" not in sent else found[0]


def _acquire(found: re.Match[str]) -> str:
    return f"{found['between']}mbarrier.try_wait.parity.acquire.cluster"


def _expect(found: re.Match[str]) -> str:
    return f"{found['between']}{found['barrier']} {_EXPECTED};"


def _alone(found: re.Match[str]) -> str:
    return _GROUP_BARRIER.sub("", found["between"]) + found["instruction"]


def _narrow(found: re.Match[str], columns: int) -> str:
    # A thread has two numbers of each eight columns and each of two rows, in the order of the columns.
    sums = found["sums"].split(",")[: columns // 2]
    return f"{found['begin']}n{columns}{found['middle']}{{{','.join(sums)}}}"


def _closer(assembly: str) -> str:
    """Return assembly in which blocks are as far apart as marks say; a mark stays where another use would be left."""
    for mark in _APART.finditer(assembly):
        number = re.escape(mark["number"])
        closer, uses = re.subn(rf"shl\.b32(\s+%r\d+, {number}), \d+;", rf"mul.lo.s32\1, {mark['bytes']};", assembly)
        if uses and uses + 1 == len(re.findall(rf"{number}\b", assembly)):
            assembly = closer.replace(mark[0], mark["copy"])
    return assembly


_APART = re.compile(rf"{_MARK}apart (?P<bytes>\d+)\n(?P<copy>\s*mov\.b32 (?P<number>%r\d+), %r\d+;)")
_COLUMNS = re.compile(rf"{_MARK}columns (\d+)\n")
_PRODUCT = re.compile(r"(?P<begin>wgmma\.mma_async\S*m64)n\d+(?P<middle>k\d+\S*\s+)\{(?P<sums>[^}]*)\}")
_ARRIVE = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[(?P<address>[^\],]*)\](?:, 1)?;"
_STORE = re.compile(r"st\.shared\.v4\.b32\s+\[\s*(?P<base>%r\d+)(?P<offset>\s*\+\s*\d+)?\s*\], (?P<values>\{[^}]*\});")
_FETCH = re.compile(
    r"(?P<when>@%p\d+) cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes"
    r" (?P<operands>\[[^\]]*\], (?P<from>\[[^\]]*\]), \[[^\]]*\]);"
)
_ALONE = r"mbarrier\.(?:init|try_wait|arrive)|wgmma\.fence|stmatrix|st\.shared"
# In this order, as `alone` goes first of two marks of one instruction.
_EDITS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_behind("alone", f"(?P<instruction>{_ALONE})", other_marks=True), _alone),
    (_behind("arrive", _ARRIVE), _arrive),
    (_behind("arrive at both", _ARRIVE), _arrive_at_both),
    (_behind("fetch for both", f"{_MARK}fetched\n"), _fetch_for_both),
    (_behind("send", f"{_MARK}sent\n"), _send),
    (_behind("received", r"mbarrier\.try_wait\.parity(?=\.shared)"), _acquire),
    (_behind("into L2", f"{_MARK}fetched\n"), _fetch_into_cache),
    (_behind(_EXPECTED, r"(?P<barrier>mbarrier\.arrive\.expect_tx\.\S+ _, \[[^\]]*\],) \d+;"), _expect),
)


def edit(assembly: str) -> str:
    """Return a kernel's PTX with its marks applied. Raises UnknownAssemblyError: what a mark announces is not there."""
    assembly = _closer(assembly)
    ahead, assembly = _SLOTS in assembly, assembly.replace(_SLOTS, "")
    for pattern, changed in _EDITS:
        assembly = pattern.sub(changed, assembly)
    if columns := _COLUMNS.search(assembly):
        narrowed, products = _PRODUCT.subn(partial(_narrow, columns=int(columns[1])), assembly)
        assembly = _COLUMNS.sub("", narrowed) if products else assembly
    met = assembly.replace(_ROLES, "").replace(f"{_MARK}meet\n", _MEET).replace(f"{_MARK}newest assembler\n", _NEWEST)
    begin = (_OTHERS if "barrier.cluster" in met else "") + (_FIND_FIRST if _FIRST in met else "")
    registers = {_RECEIVER: _SEND, _EXPECTED: f"mov.b32 {_EXPECTED},"}
    begin += "".join(f"\t.reg .b32 {name};\n" for name, used in registers.items() if used in met)
    met = _ENTRY.sub(lambda found: found[0] + begin, met)
    if left := re.search(rf"{_MARK}(.*)", met):
        raise UnknownAssemblyError(f"Triton made no instruction behind a mark for it: {left[1]}")
    met = find_ahead(met) if ahead else met
    return shorten(met) if _ROLES in assembly else met


def _assemble(assembly: str, metadata: Any, assemble: Callable[[str, Any], bytes]) -> bytes:
    """Assemble edited assembly with the assembler that it asks for, and return the code object."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime.errors import PTXASError

    knobs = triton.knobs.nvidia
    if _NEWEST not in assembly:
        return assemble(assembly, metadata)
    with suppress(PTXASError), knobs.scope():
        # Triton keeps an assembler for each generation of GPUs; each knows the older generations. A driver may
        # refuse code made by one of CUDA's next major version.
        own = get_ptxas(metadata["target"].arch)
        tools = [own, knobs.ptxas]
        with suppress(RuntimeError):  # a build of Triton may come without the other
            tools.append(knobs.ptxas_blackwell)
        newest = max((t for t in tools if _version(t)[0] == _version(own)[0]), key=_version)
        knobs.ptxas = knobs.ptxas_blackwell = newest.path
        return assemble(assembly, metadata)
    return assemble(assembly, metadata)  # a slightly slower kernel is better than none


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in tool.version.split("."))


def add_edits(stages: dict[str, Any]) -> None:
    """Have Triton's compile stages edit assembly at its marks."""
    make, assemble = stages["ptx"], stages["cubin"]
    stages["ptx"] = lambda source, metadata: edit(make(source, metadata))
    stages["cubin"] = lambda assembly, metadata: _assemble(assembly, metadata, assemble)
