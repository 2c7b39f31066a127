"""Resources read from real binaries, against what the vendors' own tools and texts say of them."""

import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.counted_calls import count_calls
from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.hip_ext.binaries import code_object

NVIDIA_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

SPILLING = {"sm90": 64, "gfx942": 128}  # sizes whose sums and addresses one warp's registers can't hold

Compiled = Callable[[str, int], SimpleNamespace]

PTX = """
.version 8.0
.target sm_{sm}
.address_size 64
.visible .entry small(.param .u64 out, .param .u32 n, .param .align 64 .b8 map[128]) .maxntid 96, 2, 1
{{
  .reg .b32 %r<3>; .reg .b64 %rd<3>; .shared .align 4 .b8 tile[256];
  ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [n];
  st.shared.u32 [tile], %r1; bar.sync 0; ld.shared.u32 %r2, [tile+4]; st.global.u32 [%rd1], %r2; ret;
}}
.visible .entry stacked(.param .u64 out)
{{
  .local .align 4 .b8 frame[64]; .reg .b32 %r<4>; .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [out]; ld.global.u32 %r1, [%rd1]; and.b32 %r2, %r1, 60; cvt.u64.u32 %rd2, %r2;
  mov.u64 %rd3, frame; add.u64 %rd4, %rd3, %rd2; st.local.u32 [%rd4], %r1; ld.local.u32 %r3, [frame+8];
  st.global.u32 [%rd1], %r3; ret;
}}
"""


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
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """(target name, size) -> a compiled product: large ones spill."""
    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
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

    return get


def ptxas(folder: Path, sm: int) -> bytes:
    (folder / "k.ptx").write_text(PTX.format(sm=sm))
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
CUBINS = [("sm90", SPILLING["sm90"]), ("sm100", 32), *(pytest.param(*c, marks=pytest.mark.heavy) for c in HEAVY)]


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


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param("gfx942", 32, marks=pytest.mark.heavy), ("gfx942", SPILLING["gfx942"]), ("gfx950", 32)],
)
def test_hsaco_figures_are_those_of_its_assembly(compiled: Compiled, name: str, size: int) -> None:
    made = compiled(name, size)
    (kernel,) = code_object.read(made.code)
    metadata = made.text[made.text.index(".amdgpu_metadata") :]

    def reported(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", metadata)
        assert found
        return int(found[1])

    assert code_object.arch(made.code) == name
    assert (kernel.symbol, kernel.wave_size, kernel.max_threads) == ("product", 64, 64)
    assert kernel.registers == reported("vgpr_count")
    assert kernel.spills == reported("private_segment_fixed_size")
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
        with pytest.raises(InputError, match=r"not an ELF|complete little-endian|truncated|section table"):
            code_object.read(code[:end])


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
    with pytest.raises(InputError, match="ELF machine 62 is neither"):
        code_object.read(Path("/proc/self/exe").read_bytes())
    relabelled = bytearray(compiled("gfx942", 32).code)
    struct.pack_into("<I", relabelled, 48, 0x54F)
    with pytest.raises(InputError, match=r"its target is gfx942, its machine number 0x4f"):
        code_object.read(bytes(relabelled))
