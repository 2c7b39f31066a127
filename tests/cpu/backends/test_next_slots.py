"""Loops in PTX that find the blocks of the next slot ahead."""

import re

from tests.support.tables import cases
from tritongemm.backends.triton.next_slots import find_ahead

HEAD = """\
	shl.b32 	%r3, %r1, 14;
	add.s32 	%r4, %r9, %r3;
	bfe.u32 	%r5, %r4, 4, 14;
"""
LOOP = """\
	mov.b32 	%r1, 0;
$L__BB0_1:
{head}	cvt.u64.u32 	%rd1, %r5;
	wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%r20,%r21}}, %rd1, %rd2, %p1, 1, 1;
	add.s32 	%r6, %r1, 1;
	selp.b32 	%r2, 0, %r6, %p2;
{later}	shl.b32 	%r7, %r1, 3;
	mov.b32 	%r1, %r2;
	@%p3 bra 	$L__BB0_1;
"""
AGAIN = HEAD.replace("%r1,", "%r2,")


OWN = LOOP.replace("%r2, 0, %r6", "%r1, 0, %r6").replace("\tmov.b32 \t%r1, %r2;\n", "")
COPY, LATER = "\tmov.b32 \t%r11, %r1;\n", "\tshl.b32 \t%r12, %r11, 3;\n"


@cases(
    ("behind its number", LOOP.format(head=HEAD, later=""), LOOP.format(head="", later=AGAIN)),
    ("the slot becomes the next one itself", OWN.format(head=HEAD, later=""), OWN.format(head="", later=HEAD)),
    ("a copy of the slot stays for what is done with it later",
     LOOP.format(head=COPY + HEAD.replace("%r1,", "%r11,"), later=LATER), LOOP.format(head=COPY, later=AGAIN + LATER)),
)  # fmt: skip
def test_a_loop_finds_the_next_slot(why: str, assembly: str, wanted: str, /) -> None:
    """Those of the first slot are found before the loop."""
    lines = [line for line in find_ahead(assembly).splitlines() if line]
    assert lines == wanted.replace("$L__BB0_1:\n", f"{HEAD}$L__BB0_1:\n", 1).splitlines(), why


@cases(
    ("used behind the next number", LOOP.format(head=HEAD, later="\tadd.s32 \t%r8, %r5, 1;\n")),
    ("used behind the loop", LOOP.format(head=HEAD, later="") + "\tadd.s32 \t%r8, %r4, 1;\n"),
    ("made of another number of the loop", LOOP.format(head=HEAD, later="\tadd.s32 \t%r9, %r9, 1;\n")),
    ("made of what the loop loads", LOOP.format(head=HEAD, later="\tld.shared.v2.b32 \t{%r8, %r9}, [%r10];\n")),
    ("loaded", LOOP.format(head=HEAD.replace("add.s32 \t%r4, %r9, %r3", "ld.shared.b32 \t%r4, [%r3]"), later="")),
    ("entered from elsewhere too", LOOP.format(head=HEAD, later="") + "\tbra.uni \t$L__BB0_1;\n"),
    ("no block is found", LOOP.format(head="", later="")),
    ("no products", re.sub("wgmma.*\n", "\n", LOOP.format(head=HEAD, later=""))),
)
def test_other_loops_stay(why: str, assembly: str, /) -> None:
    assert find_ahead(assembly) == assembly, why
