import json
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support import FAKES, emulated
from tests.support.aiter_wheel import gemm_manifests
from tests.support.nouns import Artifact, Buffer, Capsys, CompileJob, Config, Launch, Patch, Target, registry
from tests.support.products import product
from tests.support.refusals import refuses
from tests.support.tables import cases, each
from tritongemm.backends.asm import backend as asm
from tritongemm.backends.asm import manifest, param_layout
from tritongemm.cli import launch_plan
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.binaries.code_object import KernelInfo
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.plugins.contracts import BuildInputs, KernelBackend
from tritongemm.search_spaces import loader as target_files

ASM, TRITON = registry.get(KernelBackend, "asm"), registry.get(KernelBackend, "triton")
GFX942, GFX950 = target_files.load_target("gfx942"), target_files.load_target("gfx950")
BF16 = "knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias\n"
PLAIN = "_ZN5aiter37bf16gemm_fp32bf16_tn_32x64_pf3_splitkE"
CLEAN = "_ZN5aiter39bf16gemm_fp32bf16_tn_48x64_splitk_cleanE"
OWN = "a b c bias workspace semaphore m n k lda ldb ldc group_m null null"
SIZE = Problem(33, 100, 77)
TILE = "tile__bm16__bn32__bk32__gm1__sk2__w2__s2"
OwnKernel: TypeAlias = tuple[bytes, Launch, Path]  # Its code, its launch and a manifest that describes it.


def write(folder: Path, text: str) -> Path:
    (folder / "kernels.csv").write_text(text)
    return folder / "kernels.csv"


def kernel(nbytes: int, args: tuple[code_object.Argument, ...] = ()) -> KernelInfo:
    return KernelInfo("k", 512, 0, 65536, 64, nbytes, 256, args)


def built(config: Config, layout: str, nbytes: int) -> Artifact:
    fields = param_layout.fields(param_layout.LAYOUTS[layout], kernel(nbytes))
    grid = {"i8": "nk,m", "fp8_blockscale": "nk,m"}.get(layout, "n,m,k")
    facts = {"layout": layout, "fields": [[f.name, f.offset] for f in fields], "parameter_bytes": nbytes, "grid": grid}
    return Artifact(config, "", "k.co", config.template, threads=256, launch={**facts, "dynamic_shared": 0})


def kernel_launch(artifact: Artifact, problem: Problem, facts: Target) -> Launch:
    """The launch of a kernel of a manifest, which is never a call of host code."""
    launch = ASM.launch(artifact, problem, facts)
    assert isinstance(launch, Launch)
    return launch


def numbers(block: bytes) -> list[int]:
    """The 32-bit number at the start of each 16-byte slot."""
    return [struct.unpack_from("<I", block, at)[0] for at in range(0, len(block), 16)]


ONE = 0x3F800000  # 1.0


@each("nbytes", [288, 336, 352])
def test_bf16_block(nbytes: int) -> None:
    problem = Problem(100, 256, 512, *matrices("bf16", layout="TN"), bias="n")
    launch = kernel_launch(built(Config(CLEAN, 48, 64, 64, 1, 3, backend="asm"), "bf16", nbytes), problem, GFX942)
    block = launch.pack({"c": 1, "a": 2, "b": 3, "bias": 4, "semaphore": 5})
    assert len(block) == nbytes
    strides = [512, 0, 512, 0, 1024, 0, 1024, 0]  # of C, C as input, A, B, in bytes
    expected = [1, 0, 2, 3, ONE, 0, *strides, 100, 256, 512, 3, 1, 4, 1, 5]
    assert numbers(block) == expected[: nbytes // 16] and (launch.grid, launch.block) == ((4, 3, 3), (256, 1, 1))
    assert [(b.name, b.bytes) for b in launch.buffers] == ([("semaphore", 4096)] if nbytes == 352 else [])


def test_blocks_of_fp32_without_bias_and_with_scales() -> None:
    problem = Problem(1, 64, 192, *matrices("bf16", c="fp32", layout="TN"))
    block = kernel_launch(built(Config(PLAIN, 32, 64, 64, backend="asm"), "bf16", 336), problem, GFX942).pack({"c": 1})
    assert numbers(block)[6] == 64 * 4
    assert numbers(block)[17:21] == [1, 0, 0, 0]  # one split, fp32, no bias
    problem = product("a8w8", 40, 256, 384, "int8", order="shuffled_16x16")
    launch = kernel_launch(built(Config("k", 32, 128, 64, 1, 3, backend="asm"), "i8", 208), problem, GFX942)
    assert numbers(launch.pack({"c": 1, "a": 2, "b": 3, "scale_a": 4, "scale_b": 5, "semaphore": 6})) == [
        1, 2, 3, 4, 5, 6, 40, 256, 384, 384, 384, 512, 3
    ]  # fmt: skip
    assert launch.grid == (2 * 3, 2, 1)
    launch = kernel_launch(built(Config("k", 32, 128, 64, backend="asm"), "fp8_blockscale", 256), problem, GFX942)
    assert numbers(launch.pack({}))[-3:] == [40, 2, 3]
    for nbytes in (368, 384):
        launch = kernel_launch(built(Config("k", 32, 128, 64, 1, 4, backend="asm"), "fp4", nbytes), problem, GFX950)
        block = launch.pack({})
        assert len(block) == nbytes
        assert numbers(block)[23:] == ([2] if nbytes == 384 else [])  # log2 of the splits


def scaled_problem(family: str, dtype: str, k: int = 1024) -> Problem:
    return product(family, 100, 512, k, dtype, order="shuffled_16x16")


SCALED_KERNELS = [
    ("a8w8", "int8", "I8gemm_bf16_perTokenI8_BpreShuffle_32x128", GFX942),
    ("a8w8_blockscale", "fp8e4m3fnuz", "fp8gemm_bf16_blockscale_BpreShuffle_32x128", GFX942),
    ("a4w4_blockscale", "fp4e2m1", "f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128", GFX950),
]


@each(("family", "dtype", "symbol", "facts"), SCALED_KERNELS)
def test_scaled_kernels_share_k_as_aiters(tmp_path: Path, family: str, dtype: str, symbol: str, facts: Target) -> None:
    """Each split in which every workgroup has complete steps of K; the rows of AITER's manifests have no subK."""
    path = write(tmp_path, f"tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n32,128,1,1,{symbol},k.co\n")
    offered = {
        k: [c.split_k for c in asm.survey(scaled_problem(family, dtype, k), facts, [path])[0]] for k in (512, 1024)
    }
    fp4 = dtype == "fp4e2m1"
    assert offered == {512: [1, 2] if fp4 else [1, 2, 4], 1024: [1, 2, 4] if fp4 else [1, 2, 3, 4, 8]}
    alone = write(tmp_path, f"tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n32,128,0,1,{symbol},k.co\n")
    assert [c.split_k for c in asm.survey(scaled_problem(family, dtype), facts, [alone])[0]] == [1]


@each(("layout", "nbytes", "split"), [("i8", 208, 2), ("fp8_blockscale", 256, 3), ("fp4", 384, 4)])
def test_splits_add_into_a_c_that_the_launch_sets_to_zero(layout: str, nbytes: int, split: int) -> None:
    family, dtype, symbol, facts = next(
        k for k in SCALED_KERNELS if param_layout.declared("", k[2]) == param_layout.LAYOUTS[layout]
    )
    problem = scaled_problem(family, dtype)
    config = Config(symbol, 32, 128, 64, 1, split, backend="asm")
    launch = kernel_launch(built(config, layout, nbytes), problem, facts)
    assert launch.zeroed == (Buffer("c", 100 * 512 * 2),) and launch.grid[0 if layout != "fp4" else 2] % split == 0
    assert kernel_launch(built(replace(config, split_k=1), layout, nbytes), problem, facts).zeroed == ()


def test_a_bf16_kernel_writes_fp32_where_the_object_has_the_type(tmp_path: Path) -> None:
    """AITER takes its kernel of 256x256 tiles for an fp32 C too; those of an older struct write fp32 alone."""
    rows = "_ZN5aiter24bf16gemm_bf16_tn_256x256E,p.co,1,256,256,0,0,0,64,0\n"
    rows += "_ZN5aiter28bf16gemm_outf32_tn_32x64_pf3E,q.co,1,32,64,3,0,0,64,0\n"
    path = write(tmp_path, BF16 + rows)
    problem = Problem(512, 512, 512, *matrices("bf16", c="fp32", layout="TN"))
    assert len(asm.survey(problem, GFX942, [path])[0]) == 2
    narrow, refused = asm.survey(replace(problem, c=Operand("bf16")), GFX942, [path])
    assert len(narrow) == len(refused) == 1 and "writes fp32, not" in next(iter(refused.values()))
    assert not asm.survey(replace(problem, c=Operand("fp16")), GFX942, [path])[0]


@each("layout", param_layout.LAYOUTS)
def test_wrong_parameter_size_is_named(layout: str) -> None:
    with pytest.raises(InputError, match=rf"takes 200 bytes of parameters, layout {layout} has \d+"):
        param_layout.fields(param_layout.LAYOUTS[layout], kernel(200))


def test_kinds_tiles_and_splits_are_those_of_the_object(tmp_path: Path) -> None:
    arguments = [code_object.Argument(16 * i, 4, "value") for i in range(13)]
    with pytest.raises(InputError, match="parameter c at byte 0 is 4 bytes"):
        param_layout.fields(param_layout.LAYOUTS["i8"], kernel(208, tuple(arguments)))
    shuffled = PLAIN.replace("pf3", "bshuffle")
    rows = f"{PLAIN},p.co,1,32,64,3,0,0,64,1\n{CLEAN},q.co,1,48,64,0,0,1,64,1\n{shuffled},r.co,1,32,64,0,1,0,64,1\n"
    path = write(tmp_path, BF16 + rows)
    configs, refused = asm.survey(Problem(64, 64, 320, *matrices("bf16", layout="TN")), GFX942, [path])
    assert [(c.template, c.split_k) for c in configs] == [(PLAIN, 1), *((CLEAN, s) for s in (2, 3, 4, 5))]
    assert list(refused) == [shuffled] and "shuffled" in refused[shuffled]
    assert all(Config.parse(c.name) == c for c in configs)
    wide, _ = asm.survey(Problem(4096, 1024, 4096, *matrices("bf16", layout="TN")), GFX942, [path])
    assert {c.template for c in wide} == {PLAIN}  # more tiles than counters


def test_an_architecture_is_read_from_a_source_or_the_folder_of_an_absent_object(tmp_path: Path) -> None:
    problem, folder = Problem(64, 64, 320, *matrices("bf16", layout="TN")), tmp_path / "gfx942" / "bf16gemm"
    folder.mkdir(parents=True)
    path = write(folder, BF16 + f"{PLAIN},p.co,1,32,64,3,0,0,64,1\n{CLEAN},q.s,1,48,64,0,0,1,64,1\n")
    (folder / "q.s").write_text('.text\n.amdgcn_target "amdgcn-amd-amdhsa--gfx950:xnack-"\n')
    for target, left, other in ((GFX942, PLAIN, CLEAN), (GFX950, CLEAN, PLAIN)):
        configs, refused = asm.survey(problem, target, [path])
        assert {config.template for config in configs} == {left}
        assert "its code object is for gfx9" in refused[other] and f", not {target.name}" in refused[other]


@cases(
    (Problem(64, 64, 192, *matrices(layout="TN")), "it reads bf16"),
    (Problem(64, 64, 192, *matrices("bf16")), r"\(TN\), not TT"),
    (Problem(64, 64, 200, *matrices("bf16", layout="TN")), "multiple of 64"),
    (Problem(64, 100, 192, *matrices("bf16", layout="TN")), "N of 64"),
    (Problem(64, 64, 192, *matrices("bf16", layout="TN"), bias="m"), "bias along N, not m"),
    (Problem(64, 64, 192, *matrices("bf16", c="fp32", layout="TN"), bias="n"), "a bf16 bias"),
    (Problem(1, 64, 128, *matrices("bf16", layout="TN")), "192 elements of A"),
    (Problem(2**20, 64, 4096, *matrices("bf16", layout="TN")), "beyond its 32-bit"),
)
def test_problems_a_kernel_can_not_compute(problem: Problem, reason: str, /, tmp_path: Path) -> None:
    path = write(tmp_path, BF16 + f"{PLAIN},p.co,1,32,64,3,0,0,64,1\n")
    configs, refused = asm.survey(problem, GFX942, [path])
    assert not configs and re.search(reason, refused[PLAIN])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OwnKernel]:
    made = dict[str, OwnKernel]()
    for name, options in (("gfx942", "__kpack1__matrix_instr_nonkdim16__waves_per_eu0"), ("sm90", "")):
        facts, folder = target_files.load_target(name), tmp_path_factory.mktemp(name)
        one, code, file = TRITON.compile(TRITON.compile_job(Config.parse(TILE + options), SIZE, facts))
        (folder / file).write_bytes(code)
        launch = TRITON.launch(one, SIZE, facts)
        assert isinstance(launch, Launch)
        text = "knl_name,co_name,tile_m,tile_n,layout,grid,lds,threads,split,dtypes,trans\n"
        text += f'{one.symbol},{file},16,32,{OWN},"mn,k",{launch.shared},{one.threads},2,fp16,TT\n'
        made[name] = (code, launch, write(folder, text))
    return made


def job(path: Path, symbol: str, name: str = "gfx942") -> CompileJob:
    """A kernel has a job whether or not it can compute the size: compiling reports what is wrong with its code."""
    config = Config(symbol, 16, 32, 64, 1, 2, 2, 2, backend="asm")
    return ASM._compile_job(config, SIZE, target_files.load_target(name), BuildInputs(manifests=(path,)))


@pytest.mark.parametrize("name", ["gfx942", "sm90"])
def test_own_kernels_launch_as_the_backend_that_made_them(kernels: dict[str, OwnKernel], name: str) -> None:
    _, expected, path = kernels[name]
    inputs = BuildInputs(manifests=(path,))
    (config,) = ASM.candidates(SIZE, target_files.load_target(name), inputs)
    one, code, _ = ASM.compile(ASM.compile_job(config, SIZE, target_files.load_target(name), inputs))
    launch = kernel_launch(one, SIZE, target_files.load_target(name))
    addresses = {"a": 1, "b": 2, "c": 3, "workspace": 4, "semaphore": 5}
    assert launch.pack({**addresses, "bias": 3})[:96] == expected.pack({**addresses, "bias": 3})[:96].replace(
        struct.pack("<QQQQ", 1, 2, 3, 3), struct.pack("<QQQQ", 1, 2, 3, 0)
    )
    for field in ("symbol", "grid", "block", "shared", "buffers"):
        assert getattr(launch, field) == getattr(expected, field), field
    assert code_object.arch(code) == name


@pytest.mark.parametrize("reverse", [False, True])
def test_architectures_may_share_a_kernels_name(kernels: dict[str, OwnKernel], reverse: bool, tmp_path: Path) -> None:
    """Whichever manifest is named first: the object of the target is taken, and not refused for the other's."""
    code, _, path = kernels["gfx942"]
    (tmp_path / "kernel.hsaco").write_bytes(code[:48] + struct.pack("<I", 0x54F) + code[52:])  # e_flags of gfx950
    inputs = BuildInputs(manifests=(path, write(tmp_path, path.read_text()))[:: -1 if reverse else 1])
    (config,) = ASM.candidates(SIZE, GFX942, inputs)
    assert ASM.check(config, SIZE, GFX942, inputs)
    assert ASM.compile(ASM.compile_job(config, SIZE, GFX942, inputs))[1] == code
    (config,) = ASM.candidates(SIZE, GFX950, inputs)
    row = manifest.KernelRow(**ASM.compile_job(config, SIZE, GFX950, inputs).payload["row"])
    assert row.path == tmp_path / "kernel.hsaco"


def test_bad_objects_and_missing_symbols_are_named(kernels: dict[str, OwnKernel], tmp_path: Path) -> None:
    code, launch, path = kernels["gfx942"]
    text = path.read_text()

    def refused(name: str = "gfx942", **replaced: str) -> str:
        changed = text
        for old, new in replaced.items():
            changed = changed.replace({"object": "kernel.hsaco", "layout": OWN}[old], new)
        with pytest.raises(InputError) as error:
            ASM.compile(job(write(tmp_path, changed), launch.symbol, name))
        return str(error.value)

    shutil.copy(path.parent / "kernel.hsaco", tmp_path)
    (tmp_path / "short.co").write_bytes(code[: len(code) // 2])
    assert "there is no" in refused(object="missing.co") and "truncated" in refused(object="short.co")
    assert "is for gfx942, not gfx950" in refused(name="gfx950")
    assert "takes 96 bytes of parameters, layout bf16 has 288" in refused(layout="bf16")
    assert "takes 15 parameters, its manifest names 3" in refused(layout="a b c")
    assert "parameter m at byte 0" in refused(layout=" ".join(["m", *OWN.split()[1:]]))
    assert "no parameter is called zz" in refused(layout="a zz")
    assert "no layout is called 'fp7'" in refused(layout="fp7")
    refuses("no manifest holds this kernel", job, path, "unknown")
    _, launch, path = kernels["gfx942"]
    shutil.copy(path.parent / "kernel.hsaco", tmp_path)
    other = write(tmp_path, path.read_text().replace(launch.symbol, "other"))
    refuses(r"kernels.csv: line 2: other: kernel.hsaco holds tile__", ASM.compile, job(other, "other"))


def test_sources_and_ptx_are_assembled(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(
        ".version 8.0\n.target sm_80\n.address_size 64\n"
        ".visible .entry k(.param .u64 c, .param .u32 n) .maxntid 128, 1, 1 { ret; }\n"
    )
    path = write(tmp_path, "knl_name,co_name,tile_m,tile_n,layout\nk,k.ptx,32,128,c n\n")
    one, code, name = ASM.compile(job(path, "k", "sm80"))
    assert (code_object.arch(code), one.threads, name) == ("sm80", 128, "kernel.cubin")
    assert one.launch["fields"] == [["c", 0], ["n", 8]]
    shutil.copy(FAKES / "empty_kernel.s", tmp_path / "k.s")
    (tmp_path / "bad.s").write_text("nonsense v1, v2\n")
    try:
        code = toolchain.assemble(tmp_path / "k.s", "gfx942")
    except UnavailableError as missing:
        pytest.skip(str(missing))
    assert code_object.arch(code) == "gfx942"
    path = write(tmp_path, "knl_name,co_name,tile_m,tile_n,layout\nk,k.s,32,128,i8\nbad,bad.s,32,128,i8\n")
    one, _, _ = ASM.compile(job(path, "k"))
    assert (one.shared, one.threads, one.launch["parameter_bytes"]) == (64, 256, 208)
    refuses(r"refuses the source: .*bad\.s", ASM.compile, job(path, "bad"))


def plan(folder: Path, *options: str) -> int:
    size = ["-m", str(SIZE.m), "-n", str(SIZE.n), "-k", str(SIZE.k)]
    return launch_plan.main([*size, "-o", str(folder), "--num_threads", "1", "--backend", "asm", *options])


def test_plans_or_reasons(kernels: dict[str, OwnKernel], tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    code, launch, path = kernels["gfx942"]
    assert plan(tmp_path, "--manifest", str(path)) == 0
    data = json.loads((tmp_path / "plan_0.json").read_text())
    assert (data["kernel"], data["grid"], data["dynamic_lds"]) == (launch.symbol, list(launch.grid), launch.shared)
    assert [b["name"] for b in data["buffers"]] == ["a", "b", "c", "workspace", "semaphore"]
    assert (tmp_path / data["object"]).read_bytes() == code
    emulated.run(tmp_path / "plan_0.json", tmp_path)
    monkeypatch.delenv("TRITONGEMM_ASM_MANIFESTS", raising=False)
    assert plan(tmp_path, "--manifest", str(kernels["gfx942"][2]), "-dtype_a", "bf16") == 2
    assert "it is for fp16, not bf16" in capsys.readouterr().err
    assert plan(tmp_path, "--manifest", str(kernels["sm90"][2])) == 2
    assert "its code object is for sm90, not gfx942" in capsys.readouterr().err
    name = asm.survey(SIZE, GFX942, [kernels["gfx942"][2]])[0][0].name.replace("gm1__sk2", "gm1__sk3")
    assert plan(tmp_path, "--manifest", str(kernels["gfx942"][2]), "--config", name) == 2
    assert "its splits along K can be 2, not 3" in capsys.readouterr().err and plan(tmp_path) == 2
    assert "TRITONGEMM_ASM_MANIFESTS names none" in capsys.readouterr().err


@pytest.mark.skipif(not gemm_manifests(), reason="AITER's kernels are not installed: scripts/get_sources")
def test_aiters_kernels_agree_with_their_manifests_or_say_why_not() -> None:
    agree, refused = 0, []
    for path in gemm_manifests():
        facts = target_files.load_target(next((p for p in path.parts if p in target_files.target_names()), "gfx942"))
        for row in manifest.read(path):
            try:
                asm.inspect(row, row.path.read_bytes(), facts.name, facts.wave_size, facts.lds_bytes)
                agree += 1
            except InputError as error:
                refused.append(str(error))
    print(f"{agree} kernels agree, {len(refused)} are refused", *refused, sep="\n")
    assert agree
