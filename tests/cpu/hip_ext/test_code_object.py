import random
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support import FAKES
from tests.support.counted_calls import count_calls
from tests.support.nouns import Config, InputError, KernelBackend, Problem, cases, each, load_target, refuses, registry
from tests.support.tables import apart, heavy
from tritongemm.core.artifact import Artifact, LoopFacts
from tritongemm.formats import Defaults, make_problem
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.binaries.kernel_loops import measure
from tritongemm.hip_ext.binaries.lost_waits import loses_a_wait
from tritongemm.search.cost_model import model

NVIDIA_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32), "sm90": GPUTarget("cuda", 90, 32), "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
}  # fmt: skip
SPILLING = {"sm90": 64, "gfx942": 128}  # sizes whose sums and addresses one warp's registers can't hold
Compiled = Callable[[str, int], SimpleNamespace]


@triton.jit  # type: ignore[untyped-decorator]
def product(a, b, c, K, stride, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        total = tl.dot(
            tl.load(a + m[:, None] * stride + ks[None, :]), tl.load(b + ks[:, None] + n[None, :] * stride), total
        )
    tl.store(c + m[:, None] * stride + n[None, :], total)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """(target name, size) -> a compiled product: large ones spill."""
    made: dict[tuple[str, int], SimpleNamespace] = {}

    def get(name: str, size: int) -> SimpleNamespace:
        if (name, size) not in made:
            signature = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32", "stride": "i32"}
            source = ASTSource(
                product, signature | dict.fromkeys(("M", "N", "BK"), "constexpr"), {"M": size, "N": size, "BK": 32}, {}
            )
            asm = triton.compile(source, target=TARGETS[name], options={"num_warps": 1, "num_stages": 1}).asm
            made[name, size] = SimpleNamespace(
                code=asm["hsaco" if name.startswith("gfx") else "cubin"], text=asm.get("amdgcn", "")
            )
        return made[name, size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield get


def ptxas(folder: Path, sm: int) -> bytes:
    (folder / "k.ptx").write_text((FAKES / "two_kernels.ptx").read_text().replace("sm_80", f"sm_{sm}"))
    subprocess.run(
        [NVIDIA_BIN / "ptxas", f"-arch=sm_{sm}", folder / "k.ptx", "-o", folder / "k.cubin"], check=True, timeout=60
    )
    return (folder / "k.cubin").read_bytes()


def usage(folder: Path, code: bytes) -> dict[str, dict[str, int]]:
    """cuobjdump's figures by kernel."""
    (folder / "d.cubin").write_bytes(code)
    command = [str(NVIDIA_BIN / "cuobjdump"), "--dump-resource-usage", str(folder / "d.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"Function (\S+):\s+(.*)", text)
    return {name: {k: int(v) for k, v in re.findall(r"(\w+)(?:\[0\])?:(\d+)", row)} for name, row in found}


def parameters(cubin: Path) -> list[tuple[int, int]]:
    """cuobjdump's (offset, size) of every parameter of every kernel."""
    command = [str(NVIDIA_BIN / "cuobjdump"), "--dump-elf", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"Ordinal : \w+\s+Offset  : (\w+)\s+Size    : (\w+)", text)
    return sorted((int(offset, 16), int(size, 16)) for offset, size in found)


HEAVY = (("sm80", 32), ("sm90", 32))
CUBINS = [("sm90", SPILLING["sm90"]), ("sm100", 32), *(heavy(*c) for c in HEAVY)]


@pytest.mark.parametrize(("name", "size"), CUBINS)
def test_cubin_figures_are_those_of_cuobjdump(compiled: Compiled, tmp_path: Path, name: str, size: int) -> None:
    code = compiled(name, size).code
    (kernel,) = code_object.read(code)
    reported = usage(tmp_path, code)[kernel.symbol]
    assert code_object.arch(code) == name
    assert (kernel.registers, kernel.spills) == (reported["REG"], reported["STACK"])
    # from sm_90 on the tool counts 1 KiB that belongs to the system
    assert kernel.shared == reported["SHARED"] - (0 if name == "sm80" else 1024) == 0
    assert (kernel.symbol, kernel.wave_size, kernel.max_threads) == ("product", 32, 32)
    # three pointers, two integers, and Triton's two scratch pointers behind them
    assert [a[:2] for a in kernel.args] == [(0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8)]
    assert kernel.kernarg_bytes == kernel.explicit_bytes == 48
    assert (kernel.spills > 0) == (size == SPILLING.get(name))


@each("sm", [80, 90])
def test_cubin_with_two_kernels_static_shared_memory_and_a_stack(tmp_path: Path, sm: int) -> None:
    code = ptxas(tmp_path, sm)
    reported = usage(tmp_path, code)
    small, stacked = sorted(code_object.read(code), key=lambda k: k.symbol)
    assert (small.symbol, small.shared, small.max_threads, small.spills) == ("small", 256, 192, 0)
    # the compiler aligns the 64-byte parameter in the constant bank, so its offset is not a multiple of 64
    assert [a[:2] for a in small.args] == [(0, 8), (8, 4), ({80: 32, 90: 48}[sm], 128)]
    assert small.kernarg_bytes == small.explicit_bytes == {80: 160, 90: 176}[sm]
    assert sorted(a[:2] for k in (small, stacked) for a in k.args) == parameters(tmp_path / "d.cubin")
    assert (stacked.symbol, stacked.shared, stacked.max_threads) == ("stacked", 0, 1024)
    assert stacked.spills == reported["stacked"]["STACK"] == 64
    assert (small.registers, stacked.registers) == (reported["small"]["REG"], reported["stacked"]["REG"])


@apart(heavy("gfx942", 32), ("gfx942", SPILLING["gfx942"]), ("gfx950", 32))
def test_hsaco_figures_are_those_of_its_assembly(name: str, size: int, /, compiled: Compiled) -> None:
    made = compiled(name, size)
    (kernel,) = code_object.read(made.code)
    metadata = made.text[made.text.index(".amdgpu_metadata") :]

    def reported(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", metadata)
        assert found
        return int(found[1])

    assert code_object.arch(made.code) == name
    assert (kernel.symbol, kernel.wave_size, kernel.max_threads) == ("product", 64, 64)
    assert kernel.registers == reported("vgpr_count") and kernel.spills == reported("private_segment_fixed_size")
    assert kernel.shared == reported("group_segment_fixed_size")
    assert kernel.kernarg_bytes == reported("kernarg_segment_size")
    visible = [a for a in kernel.args if not a.kind.startswith("hidden_")]
    assert [a.kind for a in visible] == ["pointer"] * 3 + ["value"] * 2 + ["pointer"] * 2
    assert kernel.explicit_bytes == 48 <= kernel.kernarg_bytes
    assert (kernel.spills > 0) == (size == SPILLING.get(name))


@pytest.mark.parametrize("name", ["sm90", "gfx942"])
def test_reading_takes_few_calls(compiled: Compiled, name: str) -> None:
    code = compiled(name, SPILLING[name]).code

    assert count_calls(lambda: code_object.read(code)) < 600


@pytest.mark.parametrize("name", ["sm80", "sm90", "gfx942"])
def test_truncation_is_always_named(compiled: Compiled, name: str) -> None:
    code = compiled(name, 32).code
    for end in range(0, len(code), 97):
        refuses(r"not an ELF|complete little-endian|truncated|section table", code_object.read, code[:end])


@pytest.mark.parametrize("name", ["sm90", "gfx942"])
def test_damage_never_raises_anything_but_input_error(compiled: Compiled, name: str) -> None:
    code, chance = compiled(name, 32).code, random.Random(name)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(code)
        for _ in range(chance.choice((1, 4, 20))):
            damaged[chance.randrange(chance.choice((64, 0x700, len(code))))] = chance.randrange(256)
        try:
            code_object.read(bytes(damaged))
        except InputError:
            refused += 1
    assert refused > 200


def test_foreign_files_are_refused_with_what_they_are(compiled: Compiled) -> None:
    with pytest.raises(InputError, match=r"not an ELF file, it starts with b'__CLANG_OFFLOAD"):
        code_object.read(b"__CLANG_OFFLOAD_BUNDLE__" + bytes(100))
    refuses("ELF machine 62 is neither", code_object.read, Path("/proc/self/exe").read_bytes())
    relabelled = bytearray(compiled("gfx942", 32).code)
    struct.pack_into("<I", relabelled, 48, 0x54F)
    refuses(r"its target is gfx942, its machine number 0x4f", code_object.read, bytes(relabelled))


TRITON = registry.get(KernelBackend, "triton")
WIDE, BYTE, MATRIX = (
    "buffer_load_dwordx4 v1, s[0:3], 0 offen lds",
    "buffer_load_ubyte v1, v2, s[0:3]",
    "v_mfma_f32_x a, v",
)


def loop(*steps: str, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> LoopFacts | None:
    body = (*before, ".LBB0_1:", *steps, "s_cbranch_scc1 .LBB0_1", *after, "s_endpgm")
    return measure("\n".join(step if step.endswith(":") else f"\t{step}    ; comment" for step in body))


def wait(left: int) -> str:
    return f"s_waitcnt vmcnt({left}) lgkmcnt(0)"


@apart(
    ((wait(0), WIDE, WIDE, MATRIX), 1, 0.6),
    ((wait(2), WIDE, WIDE, MATRIX), 0, 1.6),  # of three blocks, the last is left under way
    ((wait(0), WIDE, WIDE, BYTE, MATRIX), 1, 0.5),  # what was loaded last empties the pipeline
    ((wait(2), BYTE, WIDE, WIDE, MATRIX), 0, 0.83),  # what is loaded first does not
    ((wait(3), "buffer_store_dword v1, v2, s[0:3]", WIDE, WIDE, MATRIX), 0, 1.5),  # stores count
    ((WIDE, "s_waitcnt lgkmcnt(0)", MATRIX), 0, None),
    (("s_wait_loadcnt 0x0", "buffer_load_b128 v[0:3]", "v_wmma_f32_x v[0:7]"), 1, 0.75),
    (("s_wait_asynccnt 0x1", "global_load_async_to_lds_b128 v1", "buffer_load_b32 v", MATRIX), 0, 1.8),
)
def test_waits_are_followed_over_iterations(steps: tuple[str, ...], drains: int, ahead: float | None, /) -> None:
    found = loop(*steps)
    assert found and found.ahead == (None if ahead is None else pytest.approx(ahead, abs=0.01))
    assert (found.drains, found.instructions, found.matrix) == (drains, len(steps) + 1, 1)


def test_loads_and_spilled_registers_are_counted_by_their_bytes() -> None:
    spills = "scratch_store_dwordx2 off, v[1:2], s32", "scratch_load_dword v1, off, s32"
    found = loop(WIDE, BYTE, "global_load_short_d16 v1, v2", *spills, MATRIX)
    assert found and (found.loads, found.narrow, found.spilled) == (3, 2, 12)
    assert (
        found.describe() == "7.0 instructions a matrix instruction; 2 of 3 loads of less than 4 bytes; spills 12 bytes"
    )
    assert loop("v_add_u32 v1, v1, v2") is None


def test_the_main_loop_is_an_inner_one_that_is_a_loop() -> None:
    """A jump backwards that is not reached again closes none; a wait that spins is part of its loop."""
    outer = (".LBB0_9:", MATRIX, MATRIX, MATRIX)
    found = loop(WIDE, MATRIX, ".LBB0_5:", "s_cbranch_vccz .LBB0_5", before=outer, after=("s_cbranch_scc0 .LBB0_9",))
    assert found and (found.instructions, found.matrix) == (4, 1)
    found = loop(
        WIDE,
        before=("s_branch .LBB0_3", ".LBB0_2:", *[MATRIX] * 4, "s_endpgm", ".LBB0_3:"),
        after=("s_branch .LBB0_2",),
    )
    assert found and (found.loads, found.matrix) == (1, 0)


@apart(
    heavy("gfx90a", Config("tile", 64, 64, 64, num_warps=4), True),
    ("gfx942", Config("tile", 64, 64, 64, num_warps=4), True),
    ("gfx950", Config("tile", 64, 64, 64, num_warps=4, num_stages=3), True),
    heavy("gfx1100", Config("tile", 64, 64, 32, num_warps=4), True),
    heavy("sm80", Config("tile", 64, 64, 64, num_warps=4, num_stages=3), True),
    ("sm90", Config("tma", 64, 64, 64, num_warps=4, num_stages=3), False),
    ("sm100", Config("tma", 128, 64, 64, num_warps=4, num_stages=3), False),
    ids=str,
)
def test_every_kind_of_target_is_measured(arch: str, config: Config, counted: bool, /) -> None:
    """Others are compiled in search_spaces/test_target_files.py. No wait counts loads of NVIDIA's copy engine."""
    built = compiled_loop(arch, config, "bf16", 64, 64)
    assert built.loop and 2 <= built.loop.instructions / built.loop.matrix < 60
    assert built.loop.loads >= 2 and built.loop.narrow == 0 and not built.loop.spilled
    assert (built.loop.ahead is not None) is counted and Artifact.from_json(built.to_json()) == built


def problem_of(dtype: str, m: int, n: int, **given: Any) -> Problem:
    types = {"dtype_a": dtype, "dtype_b": dtype, "dtype_c": "bf16"}
    return make_problem(Defaults(), m, n, 4096, {**types, "row_major_b": False, **given})


def compiled_loop(arch: str, config: Config, dtype: str, m: int, n: int, **given: Any) -> Artifact:
    target, problem = load_target(arch), problem_of(dtype, m, n, **given)
    built, _, _ = TRITON.compile(TRITON.compile_job(config, problem, target))
    assert built.status == "ok", built.reason
    return built


OPTIONS = (("kpack", 1), ("matrix_instr_nonkdim", 16))


@pytest.mark.heavy
def test_factors_are_loaded_in_words_ahead_of_their_sums() -> None:
    """On gfx950: shuffled powers of two and those in rows some at a time; those of fp8 blocks before the blocks."""
    for scales in ("mx_shuffled", "mx"):
        config = Config("tile", 64, 64, 512, num_warps=4, num_stages=3, options=OPTIONS)
        found = compiled_loop("gfx950", config, "fp4e2m1", 256, 4096, family="a4w4_blockscale", scales=scales).loop
        assert found and (found.narrow, found.drains) == (0, 0) and (found.ahead or 0) > 1 and found.instructions < 150
    config = Config("tile", 64, 32, 128, num_warps=2, num_stages=3, split_k=4, options=OPTIONS)
    found = compiled_loop("gfx950", config, "fp8e4m3fn", 64, 4096, family="a8w8_blockscale", scales="block").loop
    assert found and found.drains == 0 and (found.ahead or 0) > 0.7


@pytest.mark.heavy
def test_a_loop_that_spills_is_predicted_by_what_it_spills() -> None:
    """256 x 256 x 64 numbers for gfx942, in four warps or in eight whose operands are read by eights."""
    target, problem = load_target("gfx942"), problem_of("bf16", 4096, 4096)
    config = Config("tile", 256, 256, 64, num_warps=8, options=(("kpack", 2), ("matrix_instr_nonkdim", 16)))
    built = compiled_loop("gfx942", config, "bf16", 4096, 4096)
    assert built.loop and built.loop.spilled
    steady = compiled_loop("gfx942", Config("tile", 256, 256, 64, num_warps=8, options=OPTIONS), "bf16", 4096, 4096)
    assert steady.loop and steady.loop.spilled == 0
    slow, fast = (model.predict(a.config, problem, target, a).seconds for a in (built, steady))
    assert slow > 1.2 * fast


NOTHING = "s_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)"
STORE, LOAD, ALL = "ds_write_b8 v1, v2 offset:8", "ds_read_b128 a[14:17], v182", "s_waitcnt lgkmcnt(0)"
MEET = f"{NOTHING}\n\ts_barrier"


def assembly(*steps: str) -> str:
    lines = (f"{step}    ; =>This Loop" if step.endswith(":") else f"\t{step}" for step in (*steps, "s_endpgm"))
    return "\t.text\nkernel:    ; @kernel\n" + "\n".join(lines) + "\n\t.section\t.rodata\n"


@cases(
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
)  # fmt: skip
def test_stores_that_may_be_under_way_at_a_barrier(steps: tuple[str, ...], lost: bool, /) -> None:
    assert loses_a_wait(assembly(*steps)) == lost
