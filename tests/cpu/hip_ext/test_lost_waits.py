"""Waits that a compiler lost: what is followed along the paths of an assembly text."""

from tests.support.tables import each
from tritongemm.hip_ext.binaries.lost_waits import loses_a_wait

NOTHING = "s_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)"
STORE, LOAD, ALL = "ds_write_b8 v1, v2 offset:8", "ds_read_b128 a[14:17], v182", "s_waitcnt lgkmcnt(0)"
MEET = f"{NOTHING}\n\ts_barrier"


def assembly(*steps: str) -> str:
    lines = (f"{step}    ; =>This Loop" if step.endswith(":") else f"\t{step}" for step in (*steps, "s_endpgm"))
    return "\t.text\nkernel:    ; @kernel\n" + "\n".join(lines) + "\n\t.section\t.rodata\n"


@each(
    ("steps", "lost"),
    [
        ((STORE, MEET), True),
        ((MEET, STORE), False),
        ((STORE, ALL, MEET), False),
        ((STORE, "s_waitcnt vmcnt(0)", "s_barrier"), True),
        ((STORE, "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_barrier"), False),
        ((STORE, "s_barrier"), False),  # waves take turns
        ((STORE, "s_waitcnt vmcnt(0)", "v_nop", "s_barrier"), False),
        ((STORE, NOTHING, ALL, "s_barrier"), False),
        (("ds_add_u32 v1, v2", MEET), True),
        # A wait that leaves some under way, after this many loads or more, or after fewer.
        ((STORE, LOAD, LOAD, "s_waitcnt lgkmcnt(2)", MEET), False),
        ((STORE, LOAD, "s_waitcnt lgkmcnt(2)", MEET), True),
        ((STORE, LOAD, STORE, "s_waitcnt vmcnt(3) lgkmcnt(1)", MEET), True),
        ((STORE, *[LOAD] * 40, NOTHING, MEET), True),
        ((STORE, "s_load_dwordx4 s[0:3], s[4:5], 0x0", "s_waitcnt lgkmcnt(1)", MEET), True),  # it may end first
        # A loop: the wait before it is not that of its back edge.
        ((STORE, ALL, ".LBB0_1:", MEET, LOAD, STORE, "s_cbranch_scc1 .LBB0_1"), True),
        ((STORE, ALL, ".LBB0_1:", MEET, LOAD, STORE, ALL, "s_cbranch_scc1 .LBB0_1"), False),
        ((".LBB0_1:", MEET, STORE, "s_cbranch_scc0 .LBB0_2", ALL, "s_branch .LBB0_1", ".LBB0_2:"), False),
        # Two paths that meet at the barrier: one waits, both wait, or the other has nothing to wait for.
        ((STORE, "s_cbranch_vccz .LBB0_1", ALL, ".LBB0_1:", MEET), True),
        ((STORE, "s_cbranch_vccz .LBB0_1", ALL, "s_branch .LBB0_2", ".LBB0_1:", ALL, ".LBB0_2:", MEET), False),
        (("s_cbranch_vccz .LBB0_1", STORE, ALL, ".LBB0_1:", MEET), False),
        (("s_cbranch_vccz .LBB0_1", STORE, LOAD, LOAD, ".LBB0_1:", "s_waitcnt lgkmcnt(2)", MEET), False),
        # What comes after the program's end, or a jump, is not reached from there.
        ((STORE, "s_endpgm", ".LBB0_1:", MEET), False),
        ((STORE, "s_branch .LBB0_1", MEET, ".LBB0_1:", ALL), False),
    ],
)  # fmt: skip
def test_stores_that_may_be_under_way_at_a_barrier(steps: tuple[str, ...], lost: bool) -> None:
    assert loses_a_wait(assembly(*steps)) == lost
