import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import emulated, scaled_operands
from tests.support.covering import pairwise
from tests.support.nouns import Artifact, Capsys, Config, Family, KernelBackend, Patch, Target, cases, refuses, registry
from tests.support.tables import apart, heavy
from tritongemm.backends import _cpp_instances
from tritongemm.backends.ck import backend as ck_module
from tritongemm.backends.ck import instances as ck_instances
from tritongemm.cli import launch_plan
from tritongemm.core.errors import UnavailableError
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.hip_ext.binaries import elf
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.search_spaces import loader as target_files

GFX942, GFX950 = target_files.load_target("gfx942"), target_files.load_target("gfx950")
SMALL = "ck.universal__bm32__bn32__bk64__gm1__sk1__w4__s2__interwave0__pipeline1__wave_m2__xdl16"
BLOCK_SCALED = "ck.ab_scale__bm{}__bn{}__bk128__gm1__sk1__w4__s2__interwave0__pipeline{}__wave_m{}__xdl{}"
BF16 = Problem(1024, 4096, 4096, *matrices("bf16", layout="TN"))
ck = registry.get(KernelBackend, "ck")
needs_ck = pytest.mark.skipif(not ck.available(), reason=ck.available().reason)


SIZES = ((1, 4096, 4096), (33, 100, 77), (1024, 1280, 8192), (4096, 4096, 4096))
EVERY = pairwise([GFX942, GFX950], ["TN", "TT", "NN", "NT"], SIZES)


@apart(*EVERY[:2], *(heavy(*case) for case in EVERY[2:]), ids=lambda value: getattr(value, "name", str(value)))
def test_every_size_has_instances_that_render(facts: Target, layout: str, size: tuple[int, int, int], /) -> None:
    problem = Problem(*size, *matrices("bf16", layout="NT"[layout[0] == "T"] + "NT"[layout[1] == "T"]))
    configs = ck.candidates(problem, facts)
    assert configs
    for config in configs:
        assert Config.parse(config.name) == config and ck.check(config, problem, facts)
        text = ck_module.source(config, problem)
        assert "{{" not in text and f"{config.block_m}, {config.block_n}, {config.block_k}, " in text


def test_few_instances_are_compiled_and_called_with_sizes_strides_and_splits() -> None:
    section = target_files.space_file("gfx942")["ck"]
    configs = ck.candidates(BF16, GFX942)
    instances = {_cpp_instances.at_run_time(c, section["run_time"]) for c in configs}
    assert len(instances) == section["limit"]
    tiles = [i.tile for i in instances]
    assert max(map(tiles.count, tiles)) <= section["alike"]
    assert len(ck.candidates(BF16, GFX942, everything=True)) > 10 * len(configs)
    config, problem = (Config.parse(SMALL.replace("sk1", "sk4")), Problem(5, 64, 4096, *matrices("bf16", layout="TN")))
    built = Artifact(config, "", "kernel.so", launch={"parameters": [list(p) for p in ck_module._parameters(problem)]})
    call = ck.launch(built, problem, GFX942)
    values = {n: p.value for (n, _), p in zip(ck_module._parameters(problem), call.params, strict=True)}
    assert values | {"M": 5, "N": 64, "K": 4096, "lda": 4096, "ldb": 4096, "ldc": 64, "splits": 4} == values


def test_threads_share_the_tiles() -> None:
    """Every instance of the space moves each element once: threads times vectors tile the block."""
    for layout in ((True, False), (False, True)):
        problem = replace(BF16, m=1000, n=1004, k=1006).stored(layout[0], layout[1])
        for config in ck.candidates(problem, GFX942, everything=True)[::25]:
            shape = ck_instances.shape(config, problem)
            for side, block, size in (("a", config.block_m, problem.m), ("b", config.block_n, problem.n)):
                part = shape[side]
                columns, rows, _ = part["threads"]
                assert columns * rows == shape["threads"]
                across = part["dim"] == 1
                assert block % (rows * (part["vector"] if across else 1)) == 0
                assert config.block_k % (columns * part["k1"]) == 0
                assert (size if across else problem.k) % part["vector"] == 0
            _, down, _, wide = shape["c"]["threads"]
            assert down * wide == shape["threads"] and problem.n % shape["c"]["vector"] == 0


@cases(
    ("bm256__bn256__bk256", "LDS 262144 > 65536"),
    ("pipeline2", "pipeline v2; there are v1, v3"),
    ("pipeline4__wave_m2__xdl16__", "1 K blocks for pipeline v4, which wants 4"),
    ("interwave1__pipeline3", "interwave is of pipeline v1 alone"),
    ("wave_m4", "4 x 4/4 waves of 16 x 16 don't tile 32 x 32"),
    ("w1__", "1 x 1"),
    ("universall", "no template universall"),
)
def test_reasons(change: str, reason: str, /) -> None:
    name = SMALL
    for part in filter(None, change.split("__")):
        key = re.sub(r"\d+$", "", part)
        name = (
            name.replace("ck.universal__", f"ck.{part}__")
            if key == "universall"
            else re.sub(rf"(?<=__){key}\d+", part, name)
        )
    problem = replace(BF16, k=64 if "pipeline4" in change else 4096)
    if change == "w1__":
        name = name.replace("wave_m2", "wave_m1").replace("bm32__bn32", "bm24__bn32")
    assert reason in ck.check(Config.parse(name), problem, GFX942).reason


@cases(
    (BF16, target_files.load_target("sm90"), "not sm90"),
    (replace(BF16, batch=2), GFX942, "it computes single products, not batched ones"),
    (replace(BF16, b=BF16.b._replace(dtype="fp16")), GFX942, "of one type"),
    (replace(BF16, c=Operand("fp16")), GFX942, "bf16 operands give bf16 here"),
    (Problem(8, 8, 64, *matrices("fp32")), GFX942, "give nothing here"),
    (Problem(8, 8, 64, *matrices("int8", c="int32"), bias="n"), GFX942, "no bias on integers"),
    (
        replace(BF16, a=BF16.a._replace(dtype="fp4e2m1"), b=BF16.b._replace(dtype="fp4e2m1")),
        GFX942,
        "fp4e2m1 on gfx950 only, not on gfx942",
    ),
)
def test_problems_it_can_not_compute(problem: Problem, facts: Target, reason: str, /) -> None:
    assert reason in ck.supports(problem, facts).reason and ck.candidates(problem, facts) == []


def test_what_a_binary_depends_on(tmp_path: Path, monkeypatch: Patch) -> None:
    for file in (tmp_path / "include" / "ck/config.h", header := tmp_path / "include" / ck_module._HEADER):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setenv("CK_DIR", str(tmp_path))
    monkeypatch.setattr(hip_compiler, "compiler", lambda arch: hip_compiler.HipCompiler(("none",), "not asked"))
    config = replace(Config.parse(SMALL), block_m=64, block_n=128)

    def digest(problem: Problem = BF16, facts: Target = GFX942, **changed: Any) -> str:
        return ck.compile_job(replace(config, **changed), problem, facts).digest

    assert digest() == digest(replace(BF16, m=2048, k=8192)) == digest(split_k=4)
    others = [
        digest(replace(BF16, a=BF16.a._replace(dtype="fp16"), b=BF16.b._replace(dtype="fp16"), c=Operand("fp16"))),
        digest(replace(BF16, b=BF16.b._replace(row_major=True))),
        digest(replace(BF16, bias="n")),
        digest(replace(BF16, bias="m")),
        digest(replace(BF16, k=4100)),  # narrower vectors
        digest(replace(BF16, k=4104)),  # guarded
        digest(replace(BF16, m=1000)),
        digest(facts=GFX950),
        digest(block_m=32),
    ]
    assert len({digest(), *others}) == 1 + len(others)
    header.write_text("// another version\n")
    assert digest() not in others


def test_pipeline_5_reads_along_k_only_and_bundles_hold_a_code_for_each_gpu() -> None:
    config = Config.parse(SMALL.replace("pipeline1", "pipeline5").replace("bn32", "bn128").replace("bm32", "bm64"))
    assert ck.check(config, BF16, GFX942)
    assert (
        "arrays end up in scratch" in ck.check(config, replace(BF16, b=BF16.b._replace(row_major=True)), GFX942).reason
    )
    split = Config.parse(SMALL.replace("sk1", "sk4"))
    assert "adds the bias" in ck.check(split, replace(BF16, bias="n"), GFX942).reason
    integers = Problem(1024, 4096, 4096, *matrices("int8", c="int32", layout="TN"))
    assert "int32" in ck.check(split, integers, GFX942).reason
    assert all(c.split_k == 1 for c in ck.candidates(replace(BF16, bias="m"), GFX942))
    both = bundle(
        ("host-x86_64-unknown-linux--", b""),
        ("hipv4-amdgcn-amd-amdhsa--gfx942:xnack-", b"nine"),
        ("hipv4-amdgcn-amd-amdhsa--gfx950", b"five"),
    )
    assert elf.device_code(both, "gfx942") == b"nine" and elf.device_code(both, "gfx950") == b"five"
    refuses(r"for host.*, hipv4-amdgcn-amd-amdhsa--gfx950, not gfx90a", elf.device_code, both, "gfx90a")
    refuses("ends at byte", elf.device_code, both[:-2], "gfx950")
    refuses("truncated", elf.device_code, both[:40], "gfx950")
    refuses("not an ELF file", elf.device_code, b"CCOB", "gfx950")


@pytest.mark.parametrize(("facts", "dtype"), [(GFX942, "fp8e4m3fnuz"), (GFX950, "fp8e4m3fn")])
def test_block_scales_have_instances_of_their_own(facts: Target, dtype: str) -> None:
    problem = scaled_operands.problem(33, 272, 1024, scaled_operands.PAIRS["block, A in rows"], dtype)
    names = {c.name for c in ck.candidates(problem, facts, everything=True)}
    one, two = (BLOCK_SCALED.format(*numbers) for numbers in ((32, 64, 1, 2, 16), (64, 128, 3, 2, 32)))
    assert {one, two} <= names and {Config.parse(n).template for n in names} == {"ab_scale"}
    text = ck_module.source(Config.parse(two), problem)
    assert "DeviceGemmMultiD_ABScale_Xdl_CShuffle_V3<" in text and "256, 1, 128, 128, 64, 128, 128, " in text
    assert "scale_a, scale_b," in text and "{{" not in text
    wide = BLOCK_SCALED.format(32, 256, 3, 1, 32)
    assert "one scale of B for a block" in ck.check(Config.parse(wide), problem, facts).reason
    assert "multiple of 128" in ck.check(Config.parse(one), replace(problem, k=1000), facts).reason
    assert "does not apply the scales" in ck.check(Config.parse(SMALL), problem, facts).reason
    plain = replace(problem, family="dense").scaled((None, None))
    assert "does not apply the scales" in ck.check(Config.parse(one), plain, facts).reason
    assert (
        "[M, K / 128]"
        in ck.supports(replace(problem, a=problem.a._replace(scaling=scaled_operands.GROUPS)), facts).reason
    )
    assert "adds no bias" in ck.supports(replace(problem, bias="n"), facts).reason


MX_SHUFFLED = "ck.mx_shuffled__bm32__bn128__bk256__gm1__sk1__w4__s2__pipeline3__wave_m1"
SHUFFLED = "ck.{}_shuffled__bm{}__bn{}__bk{}__gm1__sk1__w4__s2__interwave0__pipeline{}__wave_m1__xdl16"


@apart(
    ("dense", "bf16", GFX950, "universal", "DeviceGemm_Xdl_CShuffleV3_BPreshuffle<"),
    ("a8w8", "fp8e4m3fnuz", GFX942, "universal", "DeviceGemmMultiD_Xdl_CShuffle_V3_BPreshuffle<"),
    (
        "a8w8_blockscale", "fp8e4m3fn", GFX950, "ab_scale",
        "DeviceGemmMultiD_BlockScale_Xdl_CShuffle_V3_BPreshuffle<",
    ),
    ("a4w4_blockscale", "fp4e2m1", GFX950, "mx", "Row, ck::tensor_layout::gemm::MFMA, Row, A, int32_t"),
)  # fmt: skip
def test_aiters_b_has_instances_of_its_own(family: str, dtype: str, facts: Target, template: str, says: str, /) -> None:
    order = "shuffled_16x16"
    made, operands = registry.get(Family, family).problem, matrices(dtype, c="bf16", layout="TN", order=order)
    problem = made(Problem(33, 512, 1024, *operands))
    configs = ck.candidates(problem, facts)
    assert {c.template for c in configs} == {f"{template}_shuffled"}
    assert all(c.option("xdl", 16) == 16 and c.split_k == 1 for c in configs)
    assert all(c.option("pipeline") != 3 or c.block_m >= 64 * c.option("wave_m") for c in configs if template != "mx")
    assert says in ck_module.source(configs[0], problem)
    assert "must be multiples of" in ck.check(configs[0], made(Problem(33, 544, 1024, *operands)), facts).reason
    scales = "block_rows" if template == "ab_scale" else ""
    plain = made(Problem(33, 512, 1024, *matrices(dtype, c="bf16", layout="TN")), scales)
    assert not any(c.template.endswith("_shuffled") for c in ck.candidates(plain, facts))
    assert "does not read B in the order plain" in ck.check(configs[0], plain, facts).reason
    few = made(Problem(33, 512, 512, *operands))
    assert "which wants 3" in ck.check(next(c for c in configs if c.block_k == 256), few, facts).reason


@needs_ck
@pytest.mark.emulator
@apart(
    ("gfx942", "fp8", "a8w8_blockscale_bpreshuffle", 128, SHUFFLED.format("ab_scale", 16, 64, 256, 1)),
    ("gfx942", "fp8", "a8w8_bpreshuffle", 128, SHUFFLED.format("universal", 16, 64, 256, 1)),
    ("gfx950", "fp4e2m1", "a4w4_bpreshuffle", 256, MX_SHUFFLED),
)
def test_instances_for_aiters_b_run(arch: str, dtype: str, family: str, n: int, name: str, /, tmp_path: Path) -> None:
    types = ["-dtype_a", dtype, "-dtype_b", dtype, "-dtype_c", "bf16", "-col_b", "--family", family, "--target", arch]
    size = ["-m", "33", "-n", str(n), "-k", "1024", "--timeout", "600", "--num_threads", "1"]
    assert launch_plan.main([*size, *types, "--config", name, "-o", str(tmp_path)]) == 0
    emulated.run_scaled(tmp_path, tmp_path / "plan_0.json")


def test_missing_headers_and_compilers_are_named(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CK_DIR", str(tmp_path))
    assert f"CK_DIR names {tmp_path}, which lacks include/{ck_module._HEADER}" in ck.available().reason
    (tmp_path / ck_module._HEADER).parent.mkdir(parents=True)
    (tmp_path / ck_module._HEADER).write_text("")
    assert "without ck/config.h" in ck.available().reason
    (tmp_path / "ck/config.h").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    hip_compiler.compiler.cache_clear()
    try:
        if not Path("/opt/rocm").is_dir():
            assert "is needed" in ck.available().reason
    finally:
        hip_compiler.compiler.cache_clear()


@pytest.mark.skipif(Path("/opt/rocm").is_dir(), reason="ROCm's own compiler is taken first")
def test_a_clang_without_its_bundler_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    for name, says in (("clang++", "clang-offload-bundler"), ("ld.lld", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="needs clang-offload-bundler, which is not beside it"):
        hip_compiler.compiler.__wrapped__("gfx942")


def bundle(*entries: tuple[str, bytes]) -> bytes:
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
    at = len(head) + sum(24 + len(t) for t, _ in entries)
    table = b""
    for triple, code in entries:
        table += struct.pack("<QQQ", at, len(code), len(triple)) + triple.encode()
        at += len(code)
    return head + table + b"".join(code for _, code in entries)


def plan(folder: Path, *options: str, size: tuple[int, int, int] = (33, 100, 77)) -> Path:
    m, n, k = map(str, size)
    types = ["-dtype_a", "bf16", "-dtype_b", "bf16", "-dtype_c", "bf16"]
    assert launch_plan.main(["-m", m, "-n", n, "-k", k, *types, "-o", str(folder), "--num_threads", "1", *options]) == 0
    return folder / "plan_0.json"


@needs_ck
@pytest.mark.heavy
@pytest.mark.parametrize("arch", ck_module.ARCHS)
def test_a_kernel_runs_as_its_host_code_launches_it(tmp_path: Path, arch: str) -> None:
    bias = ["--bias-vector", "n"] if arch == "gfx950" else []
    path = plan(tmp_path, "--target", arch, "--config", SMALL, "-col_b", *bias)
    data = json.loads(path.read_text())
    assert (data["grid"], data["block"]) == ([8, 1, 1], [256, 1, 1])
    assert [b["name"] for b in data["buffers"]] == (["a", "b", "bias", "c"] if bias else ["a", "b", "c"])
    assert (tmp_path / "plan_0.so").is_file() and "cshuffle_v3" in data["kernel"]
    if not bias:  # the same binary, whose splits add into an output that it zeroes first
        split = ["--target", arch, "--config", SMALL.replace("sk1", "sk4"), "-col_b"]
        more = json.loads(plan(tmp_path / "split", *split, size=(32, 68, 1001)).read_text())
        assert {b["name"]: b["init"] for b in more["buffers"]} == {"a": "random", "b": "random", "c": "zero"}
        assert more["grid"] == [3, 1, 4]
        assert (tmp_path / "split/plan_0.so").read_bytes() == (tmp_path / "plan_0.so").read_bytes()
    emulated.run(path, tmp_path)


@needs_ck
def test_a_plan_of_sizes_the_library_refuses_says_so(tmp_path: Path, capsys: Capsys) -> None:
    config = SMALL.replace("pipeline1", "pipeline3")
    size = ["-m", "32", "-n", "32", "-k", "128", "-dtype_a", "bf16", "-dtype_b", "bf16", "-dtype_c", "bf16", "-col_b"]
    assert launch_plan.main([*size, "-o", str(tmp_path), "--config", config]) == 2
    assert "2 K blocks for pipeline v3, which wants 3" in capsys.readouterr().err
