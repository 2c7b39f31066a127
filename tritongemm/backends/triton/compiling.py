"""Compiles kernels with Triton in this process, which loads it."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

from tritongemm.backends.triton import assembly_edits
from tritongemm.backends.triton.compile_jobs import ALIGN
from tritongemm.codegen import modules
from tritongemm.core.artifact import CODE_FILES, Artifact, CompileJob, LoopFacts
from tritongemm.core.errors import UnavailableError
from tritongemm.core.target import Target
from tritongemm.core.trial import OUR_FAULT
from tritongemm.hip_ext.binaries import code_object, kernel_loops, lost_waits
from tritongemm.system.stop_signals import postponed
from tritongemm.system.temporary_folder import TemporaryFolder

with postponed():  # an interrupt while Triton's library is imported would end the process by an abort
    import triton
    import triton.language as tl

    from tritongemm.backends.triton.front_end import quick_front_end

# Triton 3.10 changes the first one's default. The second's checks take a tenth of a compile, and are left out of all
# but debugging code at its end.
OPTIONS = {"enable_fp_fusion": True, "sanitize_overflow": False}
# What Triton calls an architecture, by the vendor.
GPU_TARGETS: dict[str, Callable[[str], tuple[str, str | int]]] = {
    "nvidia": lambda arch: ("cuda", int(arch[2:])),
    "amd": lambda arch: ("hip", arch),
}
StageChange = Callable[[dict[str, Any]], None]  # replaces some of the stages in which Triton compiles, by their names
# Whether this thread compiles into a cache that is deleted after the compile.
_COMPILES_ALONE: ContextVar[bool] = ContextVar("_COMPILES_ALONE", default=False)


def warm_up(target: Target) -> None:
    """Compile a small kernel, as a process's first compile takes half a second longer than its next ones."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tritongemm.backends.triton.compiling import multiply_tile

    gpu = GPUTarget(*GPU_TARGETS[target.vendor](target.name), target.wave_size)
    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "k": "i32", "BLOCK": "constexpr"}
    _call_triton(ASTSource(multiply_tile, types, {"BLOCK": 32}), gpu, {"num_warps": 4})


def _gluon_source(kernel: Any, types: dict[str, str], constants: dict[str, Any], attributes: dict[Any, Any]) -> Any:
    """Return the source of a kernel in Gluon, where a descriptor's type has its block's layout in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def typed(text: str) -> str:
        if not text.startswith("tensordesc<"):
            return text
        element, rows, cols = text[len("tensordesc<") : -2].replace("[", ",").split(",")
        width = {"fp32": gl.float32, "i32": gl.int32, "fp16": gl.float16, "bf16": gl.float16}.get(element, gl.int8)
        return f"{text[:-1]},{gl.NVMMASharedLayout.get_default_for([int(rows), int(cols)], width)!r}>"

    return GluonASTSource(kernel, {n: typed(t) for n, t in types.items()}, constants, attributes)


@cache
def _spare_the_hash() -> None:
    """Let Triton hash its own files only when asked for: it takes half a second of a process's first compile.

    The hash keeps binaries of two versions of Triton apart in a cache; that of `_call_triton` holds one binary.
    """
    if hasattr(triton.runtime.cache, "triton_key"):
        own = triton.runtime.cache.triton_key
        triton.runtime.cache.triton_key = lambda: triton.__version__ if _COMPILES_ALONE.get() else own()


class LostWaitError(UnavailableError):
    """A binary can't be trusted, as the compiler has left out a wait."""


def _watch(vendor: str, edited: bool, seen: list[LoopFacts | None]) -> StageChange:
    """Make Triton's stages edit assembly, refuse it where it lacks a wait, and note what its main loop has."""
    last = CODE_FILES[vendor].rpartition(".")[2]

    def change(stages: dict[str, Any]) -> None:
        if edited:
            assembly_edits.add_edits(stages)
        assemble = stages[last]

        def assemble_watched(assembly: str, metadata: Any) -> bytes:
            if vendor == "amd" and lost_waits.loses_a_wait(assembly):
                raise LostWaitError("LDS stores may not have landed at a barrier: the compiler lost a wait")
            seen.append(kernel_loops.measure(assembly))
            code: bytes = assemble(assembly, metadata)
            return code

        stages[last] = assemble_watched

    return change


def _call_triton(source: Any, target: Any, options: dict[str, Any], change: StageChange | None = None) -> Any:
    """Compile a source with Triton's compiler, leaving nothing in Triton's own cache.

    That cache would keep every intermediate form of every candidate.
    """

    def hook(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
        if stages is not None and change is not None:  # None: Triton asks what to call the change in its cache
            change(stages)
        return __name__, __name__

    _spare_the_hash()
    with (
        TemporaryFolder() as scratch,
        quick_front_end(),
        triton.knobs.cache.scope(),
        triton.knobs.compilation.scope(),
        triton.knobs.runtime.scope(),
    ):
        if change is not None:
            triton.knobs.runtime.add_stages_inspection_hook = hook
        triton.knobs.cache.dir = str(scratch)
        triton.knobs.compilation.store_binary_only = True
        # Lines of a generated text help no debugger, and are two thirds of a binary and 3 to 5 % of a compile.
        triton.knobs.compilation.disable_line_info = True
        alone = _COMPILES_ALONE.set(True)
        try:
            return triton.compile(source, target=target, options=options)
        finally:
            _COMPILES_ALONE.reset(alone)


def compile_job(job: CompileJob) -> tuple[Artifact, bytes, str]:
    """Compile one job in this process: the artifact, the code object, its file name."""
    from triton import CompilationError

    try:
        return _compile_job(job)
    except CompilationError as error:
        reason = OUR_FAULT + _why_refused(error)
    except LostWaitError as error:
        reason = str(error)
    return Artifact(job.config, job.digest, status="compile_failed", reason=reason), b"", ""


def _why_refused(error: Any) -> str:
    """Return why Triton's front end refuses a source, in one line and without the source that it quotes."""
    while error.error_message is None and error.__cause__ is not None:
        error = error.__cause__  # in a function that the kernel calls
    message = str(error).strip().splitlines()
    return f"{message[-1]} ({message[0].rstrip(':')})"


def _compile_job(job: CompileJob) -> tuple[Artifact, bytes, str]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted, vendor = job.identity, job.payload["vendor"]
    kernel = getattr(modules.run_text(wanted["source"], job.config.template), job.config.template)
    constants, attributes = wanted["constants"], _attributes(kernel, wanted)
    types = {**wanted["signature"], **dict.fromkeys(constants, "constexpr")}
    target = GPUTarget(*GPU_TARGETS[vendor](wanted["arch"]), wanted["wave"])
    make_source = _gluon_source if getattr(kernel, "is_gluon", bool)() else ASTSource

    loops: list[LoopFacts | None] = []

    def compile_kernel(constants: dict[str, Any], edited: bool) -> Any:
        source = make_source(kernel, types, constants, attributes)
        return _call_triton(source, target, wanted["options"] | OPTIONS, _watch(vendor, edited, loops))

    edited = bool(constants.get(assembly_edits.CONSTANT))
    try:
        compiled = compile_kernel(constants, edited)
    except assembly_edits.UnknownAssemblyError:
        edited = False
        compiled = compile_kernel(constants | {assembly_edits.CONSTANT: 0}, edited)
    file = CODE_FILES[vendor]
    code: bytes = compiled.asm[file.rpartition(".")[2]]
    built = replace(_artifact(job, compiled.metadata, code, edited), loop=loops[-1])
    return (built, code, file) if built.status == "ok" else (built, b"", "")


def _attributes(kernel: Any, wanted: Mapping[str, Any]) -> dict[tuple[int], list[list[Any]]]:
    """Return what Triton may assume of each parameter, by place: a divisor, and for some pointers less than 2 GiB."""
    pointers = [name for name, kind in wanted["signature"].items() if kind.startswith("*")]
    multiples = dict.fromkeys(pointers, ALIGN) | wanted["divisors"]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", d]] for name, d in multiples.items()}
    for name in wanted["small"]:
        attributes[(kernel.arg_names.index(name),)].append(["tt.pointer_range", 32])
    return attributes


def _artifact(job: CompileJob, meta: Any, code: bytes, edited: bool) -> Artifact:
    """Return the artifact of a code object, whose status says whether the target has the memory that it needs."""
    found, limit = code_object.read(code)[0], job.identity["lds"]
    shared = max(int(meta.shared), found.shared)
    built = Artifact(
        job.config,
        job.digest,
        symbol=found.symbol,
        registers=found.registers,
        spills=found.spills,
        shared=shared,
        threads=meta.num_warps * job.identity["wave"],
        launch={
            "dynamic_shared": int(meta.shared),
            "edited": edited,
            "offsets": [a.offset for a in found.explicit_args],
            "tensor_maps": [dict(m) for m in (getattr(meta, "tensordesc_meta", None) or []) if m],
        },
    )
    reason = f"shared memory {shared} > {limit} bytes" if shared > limit else ""
    if scratch := int(getattr(meta, "global_scratch_size", 0) or 0):
        reason = reason or f"needs {scratch} bytes of global scratch for each program"
    return replace(built, status="out_of_resources", reason=reason) if reason else built


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tile(a_ptr, b_ptr, c_ptr, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute C = A @ B for one tile, both operands row-major and K a multiple of BLOCK."""
    rows = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * k + start + rows[None, :])
        b = tl.load(b_ptr + (start + rows[:, None]) * BLOCK + rows[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], total)
