"""Marks in the assembly of kernels whose warps have roles, and what stands there after the edits."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget

from tests.support.nouns import Artifact, Config, Launch, Patch, Problem, loader, matrices, raising, registry, space
from tests.support.refusals import fails
from tests.support.tables import apart, cases, each, heavy
from tritongemm.backends.triton import assembly_edits, compiling
from tritongemm.backends.triton.assembly_edits import UnknownAssemblyError, edit
from tritongemm.backends.triton.role_frames import shorten
from tritongemm.codegen.template_facts import exchanges_sums
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.search.pruning.prune import prune

SM90 = loader.load_target("sm90")
# Tiles are narrow: the compiler takes twice as long for one of 128 columns, and the marks are the same.
PAIR = Config("ws_tma", 64, 64, 128, 4, num_warps=4, num_stages=4, options=(("pair", 1),))
HIGH_PAIR = replace(PAIR, block_m=128, block_n=32, num_warps=8)
ALONE = Config("ws_tma", 64, 32, 128, 4, num_warps=4, num_stages=4)
AHEAD = Config("ws_tma", 64, 32, 128, 1, num_warps=4, num_stages=12, options=(("ahead", 8),))

EXCHANGING = Config("ws_tma", 64, 64, 128, 1, split_k=2, num_warps=4, num_stages=4)


def scaled(m: int = 4096) -> Problem:
    found = registry.get(Family, "a8w8_blockscale")
    return found.problem(Problem(m, 4096, 7168, *matrices("fp8e4m3fn", c="bf16", layout="TN")))


@cache  # several tests look at the same kernel
def compiled(config: Config, problem: Problem) -> tuple[Artifact, str, str]:
    """The artifact of a kernel, the assembly that Triton made, and what was made of that."""
    seen: list[tuple[str, str]] = []

    def note(text: str) -> str:
        seen.append((text, edit(text)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly_edits, "edit", note)
        built = compiling.compile_job(registry.get(KernelBackend, "triton").compile_job(config, problem, SM90))[0]
    assert built.status == "ok", built.reason
    return built, *seen[0]


@pytest.fixture(scope="module")
def assembly() -> dict[Config, tuple[str, str]]:
    """Of each config what Triton made, and what was made of that."""
    return {config: compiled(config, scaled())[1:] for config in (PAIR, HIGH_PAIR, AHEAD)}


def test_every_mark_is_carried_out_and_the_first_weights_come_early(assembly: dict[Config, tuple[str, str]]) -> None:
    for config, (before, after) in assembly.items():
        marks = re.findall(r"// tritongemm: ([a-z ]+)\n", before)
        assert "alone" in marks and "tritongemm: " not in after
        arrivals = marks.count("arrive") + marks.count("arrive at both")
        assert after.count("@first_of_warp mbarrier.arrive") >= arrivals > 0
        assert after.count("%laneid") == 1, "a thread's number is read once: it comes late"
        removed = before.count("bar.sync") - after.count("bar.sync")
        assert removed >= arrivals, "no group waits for its threads before it arrives"
        assert ("arrive at both" in marks) == (config in (PAIR, HIGH_PAIR))
        assert "newest assembler" not in before + after, "that is for tiles of unlike parts and of three groups"
    after = assembly[AHEAD][1]
    fetched = re.search(r"cp\.async\.bulk\.prefetch\.tensor\.2d\.L2\.global \[%\S+, \{[^}]*\}\];", after)
    assert fetched and after.count("prefetch.tensor") == 1, "of B alone, and into no shared memory"
    assert re.search(r"griddepcontrol\.wait", after[fetched.end() :])
    assert all("prefetch.tensor" not in assembly[config][1] for config in (PAIR, HIGH_PAIR))


@pytest.mark.parametrize(("split", "columns"), [*(heavy(n, 32) for n in (2, 4)), (2, 48)])
def test_splits_send_each_other_their_columns(split: int, columns: int) -> None:
    """All that is stored between the marks goes to another program, nothing else: 64 rows of floats over the splits.

    24 columns of a padded tile are three pieces.
    """
    built, before, after = compiled(replace(EXCHANGING, block_n=columns, split_k=split), scaled(64))
    launch = registry.get(KernelBackend, "triton").launch(built, scaled(64), SM90)
    assert isinstance(launch, Launch) and (launch.cluster, built.spills) == (split, 0)
    stores = 64 * columns // split // (128 * 4)  # of 16 bytes a thread, to each other program
    sent = "".join(re.findall(r"// tritongemm: send\n(.*?)// tritongemm: sent\n", before, re.DOTALL))
    assert sent.count("st.shared.v4.b32") == stores * (split - 1)
    assert after.count("st.async.weak.shared::cluster") == stores * (split - 1)
    assert len(re.findall(own := r"st\.shared\S*\s+\[%r", before)) - len(re.findall(own, after)) == stores * (split - 1)
    assert after.count("mapa.shared::cluster.u32 counter") == split - 1
    assert after.count("mbarrier.try_wait.parity.acquire.cluster.shared") == 1


@cases(
    (EXCHANGING, True),
    (replace(EXCHANGING, split_k=3), False),
    (replace(EXCHANGING, split_k=1), False),
    (replace(EXCHANGING, block_n=112), True),  # padded
    (replace(EXCHANGING, block_n=112, split_k=4), False),
    (replace(EXCHANGING, block_n=104), False),  # halves of 52 columns
    (replace(EXCHANGING, block_m=256, block_n=160, num_warps=8), False),
    (replace(EXCHANGING, options=(("pair", 1),)), False),
    (replace(EXCHANGING, options=(("epilogue_parts", 2),)), False),
    (replace(EXCHANGING, block_m=128, block_n=256, num_warps=8), False),  # its sums want too much shared memory
    (Config("ws_tma_swapped", 16, 64, 128, split_k=2, num_warps=4), True),
    (Config("ws_tma_swapped", 16, 64, 128, split_k=4, num_warps=4), False),
    (Config("tma", 64, 64, 128, split_k=2, num_warps=4), False),
    (Config("gemm", 64, 64, 128, split_k=2, num_warps=4, backend="ck"), False),
)
def test_which_splits_exchange_sums(config: Config, exchanges: bool, /) -> None:
    assert exchanges_sums(config) == exchanges


def test_sums_are_sent_completely_or_not_at_all() -> None:
    """Where Triton stores part of a sum in another form, the kernel is compiled without edits, and adds through L2."""
    _, before, after = compiled(replace(EXCHANGING, block_n=32, split_k=4), scaled(64))
    stored = before.index("st.shared.v4.b32", before.index("// tritongemm: send\n"))
    other = before[:stored] + before[stored:].replace("st.shared.v4.b32", "st.shared.v4.f32", 1)
    fails(UnknownAssemblyError, "send", edit, other)
    assert "tritongemm: " not in after
    triton = registry.get(KernelBackend, "triton")
    assert "must have a block of K" in triton.check(EXCHANGING, replace(scaled(64), k=128), SM90).reason


def test_a_pair_shares_the_larger_operand(assembly: dict[Config, tuple[str, str]]) -> None:
    """B of tiles as wide as high; of higher ones A, in the two groups' parts. B is fetched first."""
    for config, shared in ((PAIR, [True, False]), (HIGH_PAIR, [False, True, True])):
        copies = re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\S*", assembly[config][1])
        assert ["multicast" in c for c in copies] == shared, config.name
    after = assembly[PAIR][1]
    assert after.count("barrier.cluster.wait") == 1 and after.count("barrier.cluster.arrive") == 2
    assert "barrier.cluster" not in assembly[AHEAD][1] and "multicast" not in assembly[AHEAD][1]


@pytest.mark.heavy  # test_all_pieces_of_a_block_are_for_both is quick
def test_blocks_of_256_bytes_come_in_two_pieces() -> None:
    """Both pieces go to both programs of a pair, or into L2."""
    linear = registry.get(Family, "a8w8").problem(Problem(128, 4096, 7168, *matrices("int8", c="bf16", layout="TN")))
    after = compiled(replace(PAIR, block_k=256, num_stages=5, options=(("ahead", 2), ("pair", 1))), linear)[2]
    copies = re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\S*", after)
    assert ["multicast" in c for c in copies] == [True, True, False, False] and after.count("prefetch.tensor") == 2


@each(("config", "rows"), [(AHEAD, (1, 64)), (HIGH_PAIR, (64, 64))])
def test_rows_that_are_not_there_are_not_fetched(config: Config, rows: tuple[int, int]) -> None:
    """Beside one row of A the copy engine would write 63 of zeros, for which it takes as long as for others."""
    built, _, after = compiled(config, scaled())
    launches = [registry.get(KernelBackend, "triton").launch(built, scaled(m), SM90) for m in (1, 4096)]
    assert [one.params[0].box for one in launches if isinstance(one, Launch)] == [(count, 128) for count in rows]
    assert len(re.findall(r"expect_tx\S+ _, \[%r\d+\], expected;", after)) == (rows[0] == 1)


def test_no_barrier_is_made_that_nothing_waits_at(assembly: dict[Config, tuple[str, str]]) -> None:
    """Shared memory of such a barrier was used for other things, and kernels that overlapped hung on an H200."""
    for config, (before, _) in assembly.items():
        assert before.count("mbarrier.init") == 2 * config.num_stages, "a slot is ready with its factors, and free"


def test_all_pieces_of_a_block_are_for_both() -> None:
    """128 columns of bf16 side by side are two copies: the copy engine swizzles 128 bytes at a time."""
    problem = Problem(1000, 776, 1032, *matrices("bf16"))
    config = Config("ws_tma", 64, 128, 32, 4, num_warps=4, num_stages=4, options=(("pair", 1),))
    _, _, after = compiled(config, problem)
    copies = re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\S*", after)
    assert ["multicast" in c for c in copies] == [True, True, False], "B in two pieces, then A in one"


def test_roles_meet_once_and_end_alone(assembly: dict[Config, tuple[str, str]]) -> None:
    """Programs that write to each other's memory too: each waits for all that comes, or for its last slot."""
    for before, after in assembly.values():
        met = [text.count("\tbarrier.sync \t1;\n") for text in (before, after)]
        assert met[0] > met[1] == 4, "of two ways into roles, and two in one that no warp has"
        ends = after.count("\tret;") - before.count("\tret;")
        assert ends >= 2 and met[0] - met[1] > 2 * ends, "each role's begin and end, and two of the first"
        for other in (
            before.replace("brx.idx", "ret;\n\tbarrier.sync \t1;\n\tbrx.idx"),
            before.replace("\tst.shared.", "\tst.global."),
        ):
            assert shorten(other) == other


def test_texts_without_marks_and_instructions_behind_the_next_stay() -> None:
    text = ".visible .entry k(\n)\n{\n\tbar.sync \t0, 128;\n\tret;\n}\n"
    assert edit(text) == text
    text = ".entry k(\n)\n{\n// tritongemm: arrive\n// tritongemm: fetched\n"
    fails(UnknownAssemblyError, "", edit, text + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];\n}\n")


@each("what", ["alone", "arrive", "arrive at both", "fetch for both", "into L2", "columns 112", "apart 14336"])
def test_what_is_not_there_is_reported(what: str) -> None:
    with pytest.raises(UnknownAssemblyError, match=f"mark for it: {what}"):
        edit(f".entry k(\n)\n{{\n\t// tritongemm: {what}\n\tret;\n}}\n")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Config("ws_tma", 64, 112, 64, num_warps=4, num_stages=3), "bf16"),
        heavy(Config("ws_tma", 64, 112, 128, num_warps=4, num_stages=3), "int8"),
    ],
)
def test_a_padded_tile_is_multiplied_as_wide_as_it_is(config: Config, kind: str) -> None:
    """A thread has half as many sums of a product as that has columns, of the 64 that the wider block has.

    112 rows of 128 bytes are as far apart as they are large.
    """
    problem = Problem(300, 1120, 512, *matrices(kind, c="int32" if kind == "int8" else kind, layout="TN"))
    _, before, after = compiled(config, problem)
    products = re.compile(r"wgmma\.mma_async\S*m64n(\d+)k\d+\S*\s+\{([^}]*)\}")
    made, narrowed = products.findall(before), products.findall(after)
    assert {n for n, _ in made} == {"128"} and {n for n, _ in narrowed} == {"112"}
    assert [sums.split(",")[:56] for _, sums in made] == [sums.split(",") for _, sums in narrowed]
    places = re.findall(r"(?:(shl\.b32)|(mul\.lo\.s32))\s+%r\d+, (%r\d+), (?:14|14336);", after)
    moved = set(re.findall(r"apart 14336\nmov\.b32 (%r\d+),", before))
    assert len(moved) == 2, "where blocks are fetched and where they are multiplied"
    assert {number for _, changed, number in places if changed} == moved
    assert not moved & {number for shifted, _, number in places if shifted}


@pytest.mark.heavy  # marks and barriers of tiles whose sums are scaled are counted in those of `assembly` too
@pytest.mark.parametrize("along_k", [False, True])
def test_the_two_parts_of_a_tile(along_k: bool) -> None:
    """A group of warps keeps in step, but not where sums of blocks are scaled."""
    problem = scaled() if along_k else Problem(4096, 4096, 7168, *matrices("bf16", layout="TN"))
    block_n, block_k = (128, 128) if along_k else (288, 64)
    config = Config("ws_tma", 128, block_n, block_k, 4, num_warps=8, num_stages=3, options=(("epilogue_parts", 2),))
    _, before, _ = compiled(config, problem)
    assert "// tritongemm: arrive" in before
    assert (before.count("// tritongemm: alone") > config.num_stages) == along_k, "apart from where barriers are made"
    assert before.count("mbarrier.init") == 2 * config.num_stages


@each(("m", "n", "config", "pairs"), [(300, 1024, PAIR, 3 * 16), (100, 4096, HIGH_PAIR, 1 * 64)])
def test_a_launch_of_pairs(m: int, n: int, config: Config, pairs: int) -> None:
    """300 rows are three pairs of 64 and 1024 columns 16 tiles of 64; or 4096 columns are as many pairs of 32."""
    triton, problem = registry.get(KernelBackend, "triton"), replace(scaled(m), n=n)
    jobs = [triton.compile_job(config, one, SM90) for one in (scaled(), problem)]
    assert jobs[0].digest == jobs[1].digest, "one binary for all sizes"
    launch = triton.launch(compiled(config, scaled())[0], problem, SM90)
    assert isinstance(launch, Launch) and launch.cluster == 2 and launch.grid == (2 * pairs, 1, 1)


@pytest.mark.parametrize(("m", "n", "programs"), [(64, 928, 30), (32, 960, 30), (4096, 4096, 132)])
def test_a_launch_of_adjacent_programs(m: int, n: int, programs: int) -> None:
    """An odd number of tiles gets a program without one, and many tiles a program for each compute unit."""
    triton, problem = registry.get(KernelBackend, "triton"), replace(scaled(m), n=n)
    config = replace(ALONE, options=(("adjacent", 1),))
    built, _, after = compiled(config, scaled())
    assert built.digest == triton.compile_job(ALONE, problem, SM90).digest, "the binary is that of other launches"
    launch = triton.launch(built, problem, SM90)
    assert isinstance(launch, Launch) and launch.cluster == 2 and launch.grid == (programs, 1, 1)
    assert "shared::cluster.global.mbarrier::complete_tx::bytes.multicast" not in after, "each fetches for itself"
    for other in (replace(config, split_k=2), replace(config, options=(("adjacent", 1), ("share", 1)))):
        assert "adjacent must be 0, or 1 without" in triton.check(other, problem, SM90).reason


@pytest.mark.heavy  # test_the_two_parts_of_a_tile and tiles of unlike parts are quick
def test_a_high_tile_is_multiplied_in_halves() -> None:
    """Both halves of the rows have their sums in the same registers, of which there are enough for one."""
    config = Config("ws_tma", 256, 128, 128, 8, num_warps=8, num_stages=3, options=(("epilogue_parts", 4),))
    built, _, after = compiled(config, scaled())
    assert built.spills == 0
    blocks = re.findall(r"wgmma\.wait_group.*?wgmma\.wait_group", after, re.DOTALL)
    inside = [b for b in blocks if "wgmma.mma_async" in b and "mbarrier.try_wait" in b]
    assert len(inside) == 2 and not any("bar.sync" in b for b in inside), "in each group of warps a block's lower half"


def test_unknown_assembly_is_left_as_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr(assembly_edits, "edit", raising(UnknownAssemblyError("a new version")))
    problem = Problem(1000, 776, 1032, *matrices("bf16", layout="TN"))
    config = Config("ws_tma", 64, 32, 32, num_warps=4, num_stages=3, options=(("pair", 1),))
    triton = registry.get(KernelBackend, "triton")
    built, code, _ = compiling.compile_job(triton.compile_job(config, problem, SM90))
    launch = triton.launch(built, problem, SM90)
    assert isinstance(launch, Launch) and launch.cluster == 1 and code


@apart((64, 64, False), (256, 128, True), (384, 128, False), (4096, 128, True))
def test_pairs_are_searched_where_there_are_many_rows(m: int, block_m: int, pairs: bool, /) -> None:
    problem = scaled(m)
    kept: Any = prune(space(problem, SM90, templates=("ws_tma",)), problem, SM90).kept
    assert {c.option("pair") for c in kept if c.block_m == block_m <= c.block_n} == ({0, 1} if pairs else {0})
    high = [c for c in kept if c.block_n < c.block_m < m and c.split_k == 1]
    assert any(c.option("pair") for c in high) == (m >= 256), "4096 columns are pairs of any tile's"
    assert all(c.block_n >= 128 for c in high if c.option("pair")), "of narrow ones each would wait for the other's B"


@pytest.mark.heavy
@pytest.mark.parametrize(("block_m", "block_n", "warps"), [(128, 128, 8), (128, 192, 8), (192, 64, 12), (128, 256, 8)])
def test_unlike_parts_and_three_groups_want_the_newest_assembler(block_m: int, block_n: int, warps: int) -> None:
    """Both parts' products of 128 and 64 columns are on their way before the first part's sum is waited for."""
    config = Config("ws_tma", block_m, block_n, 128, 4, num_warps=warps, num_stages=3, options=(("epilogue_parts", 2),))
    built, before, after = compiled(config, scaled())
    assert built.spills == 0
    ahead = after.count("bfe.u32") > before.count("bfe.u32")  # loops find the next block's address ahead
    assert ahead == (block_n > 128), "of one part that lost"
    wanted = block_n == 192 or warps == 12
    assert ("// tritongemm: newest assembler" in before) == ("// by the newest assembler" in after) == wanted
    if block_n == 192:
        assert re.search(r"m64n128k32(?:(?!wait_group).)*m64n64k32.*?wait_group\.sync\.aligned 1;", after, re.DOTALL)


@cases(
    ("12.8", "12.9", "12.9"),
    ("12.8", "12.10", "12.10"),  # no decimal fraction
    ("12.8", "13.1", "12.8"),  # a driver of CUDA 12 may refuse it
    ("13.4", "12.9", "13.4"),
    ("12.8", "", "12.8"),
    ("12.8", "12.99", "12.8"),  # it fails, as one that TRITON_PTXAS_BLACKWELL_PATH names may
)
def test_newest_assembler_of_a_major_version_is_used(own: str, other: str, used: str, /, monkeypatch: Patch) -> None:
    import triton
    from triton.backends.nvidia import compiler
    from triton.knobs import NvidiaTool
    from triton.runtime.errors import PTXASError

    def find(path: str) -> Any:
        return NvidiaTool(path, path) if path else raising(RuntimeError("Cannot find ptxas-blackwell"))()

    def note(assembly: str, metadata: Any) -> bytes:
        if triton.knobs.nvidia.ptxas.path == "12.99":
            raise PTXASError("broken")
        return str(triton.knobs.nvidia.ptxas.path).encode()

    knobs = vars(type(triton.knobs.nvidia))
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: NvidiaTool(own, own))
    for name, version in (("ptxas", own), ("ptxas_blackwell", other)):
        monkeypatch.setattr(knobs[name], "get", lambda version=version: find(version))
        monkeypatch.setattr(knobs[name], "transform", find)
    metadata = {"target": GPUTarget("cuda", 90, 32)}
    assert assembly_edits._assemble("// by the newest assembler\n", metadata, note).decode() == used
    assert triton.knobs.nvidia.ptxas.path == own
