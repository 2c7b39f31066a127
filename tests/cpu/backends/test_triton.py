import inspect
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.nouns import Config, Family, KernelBackend, Launch, Patch, Problem, load_target, matrices, registry
from tests.support.tables import apart, cases, heavy
from tritongemm.backends.triton import backend as triton_backend
from tritongemm.backends.triton import compiling, front_end
from tritongemm.backends.triton.compiling import multiply_tile
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.trial import OUR_FAULT
from tritongemm.system import settings

TRITON = registry.get(KernelBackend, "triton")


def test_sizes_are_run_time_arguments() -> None:
    """48 sizes of one alignment have one binary for each config: M, N and K are in none of them."""
    target = load_target("gfx942")
    configs = [Config("tile", 16, 16, 16), Config("tile", 32, 16, 16, 1, 2), Config("stream_k", 16, 16, 16)]
    sizes = [Problem(m, 16 * n, 16 * k) for m in (1, 7, 16, 100) for n in (1, 5, 9, 300) for k in (1, 2, 77)]
    assert len(sizes) == 48
    assert len({TRITON.compile_job(c, p, target).digest for c in configs for p in sizes}) == len(configs)
    one = TRITON.compile_job(configs[0], sizes[0], target)
    assert not {"M", "N", "K"} & one.identity["constants"].keys()
    assert {"M", "N", "K"} <= one.identity["signature"].keys()


@cases(
    {"k": 17},  # masks along K, and rows that are not aligned
    {"n": 17},
    {"dtype_c": "fp32"},
    {"row_major_b": False},
    {"bias": "n"},
)
def test_what_the_binary_depends_on_is_in_its_name(other: dict[str, Any], /) -> None:
    target, config, problem = load_target("gfx942"), Config("tile", 16, 16, 16), Problem(16, 16, 16)
    digest = TRITON.compile_job(config, problem, target).digest
    assert TRITON.compile_job(config, Problem.from_json(problem.to_json() | other), target).digest != digest


def test_triton_hashes_its_own_files_for_others_alone(monkeypatch: Patch) -> None:
    """It takes half a second, and a compile of ours leaves nothing in Triton's cache that a hash would distinguish."""
    import triton

    asked = list[str]()

    def hashed() -> str:
        asked.append("")
        return "a hash"

    monkeypatch.setattr(triton.runtime.cache, "triton_key", hashed)
    compiling._spare_the_hash.cache_clear()
    try:
        compiling.warm_up(load_target("gfx942"))
        assert not asked and triton.runtime.cache.triton_key() == "a hash" and len(asked) == 1
    finally:
        compiling._spare_the_hash.cache_clear()  # the next compile spares what monkeypatch brings back


def words(code: bytes) -> Iterable[int]:
    """A code object that contains its instructions."""
    return memoryview(code[: len(code) // 4 * 4]).cast("I")


def test_a_load_of_less_than_2_gib_is_masked_without_a_branch() -> None:
    """By a buffer instruction, whose offset has 32 bits, where the target has any."""
    config = Config("tile", 32, 32, 32, 1, 1, 4, 2)
    under, over = Problem(64, 2**15 - 16, 2**15), Problem(64, 2**15, 2**15)
    gfx, sm = load_target("gfx942"), load_target("sm90")
    pointers = ["a_ptr", "b_ptr", "c_ptr", "bias_ptr", "workspace_ptr", "semaphore_ptr"]
    assert triton_backend.small(config, under, gfx) == pointers
    assert triton_backend.small(config, over, gfx) == [p for p in pointers if p != "b_ptr"]
    assert triton_backend.small(config, under, sm) == []
    branches = []
    for problem in (under, over):
        code = TRITON.compile(TRITON.compile_job(config, problem, gfx))[1]
        branches.append(sum(w >> 16 == 0xBF88 for w in words(code)))  # s_cbranch_execz
    assert branches[0] < branches[1]


def test_what_is_compiled_is_the_text_that_names_the_binary() -> None:
    """A job has all of it: the same kernel for two targets differs, and one edited has another name and other code."""
    config, problem = Config("tile", 32, 32, 32, 1, 2, 4, 2), Problem(64, 64, 512)
    job = TRITON.compile_job(config, problem, load_target("gfx942"))
    assert job.payload == {"vendor": "amd"}
    edited = replace(job, identity=job.identity | {"source": job.identity["source"].replace(".wt", ".cs")})
    (one, code, _), (other, other_code, _) = TRITON.compile(job), TRITON.compile(edited)
    assert one.digest != other.digest and code != other_code and TRITON.compile(job)[1] == code


@pytest.mark.parametrize(("arch", "dtype"), [heavy("gfx942", "fp8e5m2fnuz"), ("gfx950", "fp8e4m3fn")])
def test_a_c_of_eight_bits_leaves_the_mode_of_fp16_alone(arch: str, dtype: str) -> None:
    """Triton's own conversions to it make whatever else a kernel computes in fp16 saturate."""
    config, problem, target = (
        Config("tile", 16, 16, 64, 1, 1, 1, 2),
        Problem(16, 16, 64, *matrices(c=dtype)),
        load_target(arch),
    )
    changes = []
    for how in (target, replace(target, features=target.features - {"narrow_fp8"})):
        code = TRITON.compile(TRITON.compile_job(config, problem, how))[1]
        changes.append(sum(w >> 23 == 0x174 for w in words(code)))  # s_setreg_imm32_b32
    assert changes[0] == 0 < changes[1]


@pytest.mark.skipif(not settings.version("triton").startswith("3.9."), reason="Triton 3.9's LLVM loses the wait")
@apart(
    heavy(
        "a8w8_blockscale", (33, 17, 545), "int8", 1, Config("tile", 64, 32, 128, split_k=2, num_warps=2, num_stages=3)
    ),
    ("dense", (17, 219, 2048), "bf16", 3, Config("tile", 16, 64, 32, split_k=6, num_warps=8)),
)
def test_a_binary_with_a_lost_wait_is_refused(
    family: str, size: tuple[int, int, int], dtype: str, batch: int, config: Config, /
) -> None:
    """On gfx950, where threads write operands into LDS at a loop's end: a wait for nothing is left, or one for loads.

    Rows of A begin at no multiple of 4 bytes in the one, and a thread has a single number of it in the other.
    """
    problem = registry.get(Family, family).problem(Problem(*size, *matrices(dtype, c="bf16", layout="TN"), batch=batch))
    fixed = replace(config, options=(("matrix_instr_nonkdim", 16), ("xcds", 8)))
    refused, code, _ = TRITON.compile(TRITON.compile_job(fixed, problem, load_target("gfx950")))
    assert (refused.status, code) == ("compile_failed", b"")
    assert refused.failed_trial().reason == "LDS stores may not have landed at a barrier: the compiler lost a wait"


def test_a_source_that_the_front_end_refuses_is_a_fault_of_ours() -> None:
    """The reason is one line, of the function at fault, without the lines of source that Triton quotes."""
    job = TRITON.compile_job(Config("tile", 16, 16, 16), Problem(16, 16, 16), load_target("gfx942"))
    text, begin = job.identity["source"], "    pid = tl.program_id(0)\n"
    helper = "@triton.jit\ndef halved(x):\n    return x + missing\n"
    for source, place in (
        (text.replace(begin, begin + "    missing(pid)\n"), "at "),
        (
            text.replace("@triton.jit", helper + "\n\n@triton.jit").replace(begin, begin + "    halved(pid)\n"),
            "at 2:15",
        ),
    ):
        refused, _, _ = TRITON.compile(replace(job, identity={**job.identity, "source": source}))
        assert refused.status == "compile_failed"
        assert refused.reason.startswith(f"{OUR_FAULT}NameError('missing is not defined') ({place}")
        assert "\n" not in refused.reason


def test_rows_that_start_at_16_bytes_are_read_so() -> None:
    """1000 is no multiple of 16, but rows of 1000 halves start at multiples of 16 bytes: loads are of full width."""
    assert triton_backend.divisors(Problem(3, 200, 1000)) == {
        "N": 8, "K": 8, "stride_a": 8, "stride_b": 8, "stride_c": 8,
    }  # fmt: skip
    assert triton_backend.divisors(Problem(6, 33, 1001, *matrices(layout="NT"))) == {"M": 2, "stride_a": 2}
    target, config, wide = load_target("gfx942"), Config("tile", 32, 32, 64, num_warps=2), {}
    for k in (1024, 1000, 1001):
        code = TRITON.compile(TRITON.compile_job(config, Problem(64, 64, k, *matrices(layout="TN")), target))[1]
        wide[k] = sum(w >> 26 == 0x38 and w >> 18 & 0x7F == 0x17 for w in words(code))  # buffer_load_dwordx4
    assert wide[1000] == wide[1024] > 0 == wide[1001]


def test_so_is_the_toolchain(monkeypatch: Patch) -> None:
    config, problem = Config("tile", 16, 16, 16), Problem(16, 16, 16)
    digest = TRITON.compile_job(config, problem, load_target("gfx942")).digest
    assert TRITON.compile_job(config, problem, load_target("gfx950")).digest != digest
    assert TRITON.compile_job(replace(config, num_warps=1), problem, load_target("gfx942")).digest != digest
    monkeypatch.setattr("tritongemm.system.settings.version", lambda _: "99")
    assert TRITON.compile_job(config, problem, load_target("gfx942")).digest != digest


def test_triton_compiles_without_a_gpu_and_only_once(session_cache: Path) -> None:
    """A real compile: another size finds the binary, what does not fit LDS says so, and knows no sizes."""
    target, problem = load_target("gfx942"), Problem(24, 16, 32)
    good, large = Config("tile", 16, 16, 16, num_warps=1), Config("tile", 16, 16, 2048, num_warps=4)
    made = BuildPool(ArtifactCache(session_cache), jobs=1)
    try:
        found = {b.config: b for b in made.stream(TRITON.compile_job(c, problem, target) for c in (good, large))}
        assert found[good].status == "ok", found[good].reason
        assert (found[good].symbol, found[good].threads) == (good.kernel_name, 64)
        assert found[good].registers > 0 and os.path.getsize(found[good].path) > 1000
        assert (found[large].status, found[large].path) == ("out_of_resources", "")
        assert "shared memory" in found[large].reason and "> 65536 bytes" in found[large].reason
        other = Problem(400, 48, 64)
        (again,) = made.stream([TRITON.compile_job(good, other, target)])
        assert (again.path, again.seconds) == (found[good].path, 0.0)
        launch = TRITON.launch(again, other, target)
        assert isinstance(launch, Launch) and launch.grid == (25 * 3, 1, 1)
    finally:
        made.close()


def test_functions_are_parsed_once_and_methods_have_signatures_of_their_own() -> None:
    from triton.compiler import code_generator

    with front_end.quick_front_end():
        first = multiply_tile.parse()
        assert multiply_tile.parse() is first
        name = code_generator.inspect.signature(str.join)
        assert code_generator.inspect.signature(str.join) is name

    class Tensor:
        def to(self, dtype: str, _semantic: object = None) -> None:
            """As a builtin of Triton's tensors."""

    signature_of = front_end._remember_signatures(inspect.signature)
    for one in (Tensor.to, Tensor().to, Tensor().to, Tensor.to):
        assert signature_of(one) == inspect.signature(one)


def test_warnings_and_names_of_other_versions_are_left_as_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with front_end.quick_front_end():
            warnings.warn("an old node", DeprecationWarning, stacklevel=1)
            with pytest.raises(UserWarning):
                warnings.warn("a kernel's own", UserWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("an old node", DeprecationWarning, stacklevel=1)
    module = ModuleType("later")
    front_end._replace(module, "ast", parse=lru_cache(1))
    assert not hasattr(module, "ast")


def test_a_kernel_is_the_same_without_locations_and_others_keep_theirs(tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "k": "i32", "BLOCK": "constexpr"}

    def compiled(what: str, with_lines: bool) -> str:
        triton.knobs.compilation.disable_line_info = not with_lines
        source = ASTSource(multiply_tile, types, {"BLOCK": 32})
        found: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm[what]
        return found

    lines, first = inspect.getsourcelines(multiply_tile.fn)
    product = f'compiling.py":{first + next(i for i, line in enumerate(lines) if "tl.dot" in line)}:'
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.always_compile = True
        plain = compiled("ptx", with_lines=False)
        assert product in compiled("ttir", with_lines=True)
        with front_end.quick_front_end():
            assert compiled("ptx", with_lines=False) == plain and product not in compiled("ttir", with_lines=True)
        assert product in compiled("ttir", with_lines=True)


def test_a_fault_in_a_kernel_names_its_line() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(multiply_tile, {"a_ptr": "*fp16", "b_ptr": "*i32", "c_ptr": "*fp32", "k": "i32"}, {"BLOCK": 32})
    with pytest.raises(triton.CompilationError, match=r"total = tl\.dot"), front_end.quick_front_end():
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_a_tuple_type_is_named_when_it_is_asked_for() -> None:
    """As the version that names it at once would."""

    class AtOnce:
        def __init__(self, types: list[str], fields: list[str] | None = None) -> None:
            self.types, self.fields = types, fields or [""] * len(types)
            self.name = "made at once"

    module = ModuleType("core")
    module.tuple_type = AtOnce  # type: ignore[attr-defined]
    front_end._name_tuples_when_asked(module)
    assert [AtOnce(["i32", "fp8"]).name, AtOnce(["i32"], ["x"]).name] == ["[:i32,:fp8]", "[x:i32]"]
    front_end._name_tuples_when_asked(module)  # it is as later versions have it now
    assert AtOnce(["i1"]).name == "[:i1]"
