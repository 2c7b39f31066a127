"""The backend of assembly kernels from manifests (`backends.asm.manifest`), as code objects or as sources to assemble.

A config's template is the kernel's symbol. Kernels that add into C from several workgroups get a C that is zeroed
before each launch; kernels that share the K loop of a tile use the splits that AITER's tuner tries.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritongemm.backends.asm import fit as asm_fit
from tritongemm.backends.asm import manifest, param_layout, scaled
from tritongemm.backends.asm.fit import COUNTERS, layout_name, splits
from tritongemm.backends.asm.manifest import KernelRow
from tritongemm.backends.asm.param_layout import LAYOUTS, Field
from tritongemm.core.artifact import CODE_FILES, Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.integers import cdiv
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import MX_DEPTH, SCALED_BLOCK
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.binaries.code_object import KernelInfo
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.plugins.contracts import NO_INPUTS, BuildInputs, Capabilities, KernelBackend
from tritongemm.search.cost_model import model as cost_model
from tritongemm.system import settings

_THREADS = 256  # of AITER's workgroups
_WAVE = 64  # threads of a wave, on the GPUs that AITER's kernels are for
_DEPTH = 64  # of K in one step, where a manifest does not say
_TILE, _PREFETCH = re.compile(r"_(\d{1,5})x(\d{1,5})(?=_|E$|$)"), re.compile(r"_pf(\d)(?=_|E$|$)")
_GRIDS = {"i8": "nk,m", "fp8_blockscale": "nk,m"}


class AsmBackend(KernelBackend):
    """The kernels of the manifests that the environment or the caller names."""

    summary = "assembly kernels of the manifests in TRITONGEMM_ASM_MANIFESTS"
    capabilities = Capabilities(orders_b=(PLAIN, "shuffled_16x16"), scales=("epilogue", "mainloop"))

    def available(self) -> Support:
        """Say whether a manifest is named; a missing file is only detected when it is read."""
        named = settings.asm_manifests()
        return SUPPORTED if named else Support("no manifest of assembly kernels: TRITONGEMM_ASM_MANIFESTS names none")

    def named_kernel(self, config: Config | None) -> NamedKernel | None:
        """Return a kernel by its symbol."""
        return None if config is None else NamedKernel(self.name, config.template, split_k=config.split_k)

    def config_of(self, kernel: NamedKernel) -> Config | None:
        """Return the config of one of AITER's kernels, whose symbol has its tile, as from its manifest's row."""
        tile, prefetch = _TILE.search(kernel.name), _PREFETCH.search(kernel.name)
        if not tile or not re.fullmatch(r"\w+", kernel.name):
            return None
        stages = int(prefetch[1]) if prefetch else 2
        shape = int(tile[1]), int(tile[2]), _DEPTH, 1, kernel.split_k, _THREADS // _WAVE, stages
        return Config(kernel.name, *shape, backend=self.name)

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        configs = survey(problem, target, inputs.manifests)[0]
        return cost_model.rank(tuple(configs), problem, target).configs

    def _has_candidates(self, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        configs, refused = survey(problem, target, inputs.manifests)
        if configs:
            return SUPPORTED
        reasons = [f"{symbol}: {reason}" for symbol, reason in refused.items()]
        if not reasons:
            return Support("the manifests list no kernel") if inputs.manifests or self.available() else self.available()
        return Support(reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""))

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        configs, refused = survey(problem, target, inputs.manifests, config.template)
        # The grid follows from the config, so it must have the tile that the kernel has.
        made_for = {(c.tile, c.group_m) for c in configs}
        if made_for and (config.tile, config.group_m) not in made_for:
            tiles = " or ".join(f"{'x'.join(map(str, tile))} in groups of {group}" for tile, group in sorted(made_for))
            return Support(f"its tile is {tiles}, not {'x'.join(map(str, config.tile))} in groups of {config.group_m}")
        offered = [c.split_k for c in configs]
        if offered and config.split_k not in offered:
            splits_text = ", ".join(map(str, offered))
            return Support(f"its splits along K can be {splits_text}, not {config.split_k}")
        missing = "" if offered else "no manifest holds this kernel; TRITONGEMM_ASM_MANIFESTS or --manifest names them"
        return Support(refused.get(config.template, missing))

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        row, code = _find_row(config, problem, target, inputs.manifests)
        described = asdict(row)
        identity = {
            "backend": "asm",
            "arch": target.name,
            "wave": target.wave_size,
            "lds": target.lds_bytes,
            "code": hashlib.sha256(code).hexdigest(),
            "config": config.name,
            "row": {k: v for k, v in described.items() if k not in ("manifest", "line")},
        }
        return CompileJob(config, identity, {"row": described, "file": CODE_FILES[target.vendor]})

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        """Load or assemble one kernel and check it against its manifest."""
        row, wanted = KernelRow(**job.payload["row"]), job.identity
        if not row.path.is_file():
            raise InputError(f"{row.where}: there is no {row.path}")
        source = row.path.suffix in toolchain.SUFFIXES
        code = toolchain.assemble(row.path, wanted["arch"]) if source else row.path.read_bytes()
        kernel, fields = inspect(row, code, wanted["arch"], wanted["wave"], wanted["lds"])
        name = layout_name(row)
        artifact = Artifact(
            job.config,
            job.digest,
            symbol=row.symbol,
            registers=kernel.registers,
            spills=kernel.spills,
            shared=kernel.shared + row.lds,
            threads=row.threads or kernel.max_threads,
            launch={
                "layout": name,
                "fields": [[f.name, f.offset] for f in fields],
                "parameter_bytes": kernel.kernarg_bytes if name else kernel.explicit_bytes,
                "grid": row.grid or _GRIDS.get(name, "n,m,k"),
                "dynamic_shared": row.lds,
            },
        )
        return artifact, code, job.payload["file"]

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch:
        return _make_launch(artifact, problem)


def survey(
    problem: Problem, target: Target, manifests: Sequence[Path] = NO_INPUTS.manifests, symbol: str = ""
) -> tuple[list[Config], dict[str, str]]:
    """Return the kernels that can compute a problem, each with its splits; and why the others can't, by symbol.

    Without manifests those of the environment are read; a symbol selects the kernels of this name.
    """
    configs, refused = list[Config](), dict[str, str]()
    for row in (r for r in _rows(manifests) if symbol in ("", r.symbol)):
        reason = asm_fit.refusal(row, problem, target)
        if reason:
            refused[row.symbol] = reason
        else:
            configs += [_config(row, target, split) for split in splits(row, problem, target)]
    offered = {config.template for config in configs}  # manifests of two architectures may share a kernel's name
    return list(dict.fromkeys(configs)), {name: why for name, why in refused.items() if name not in offered}


def _rows(manifests: Sequence[Path]) -> list[KernelRow]:
    return [row for path in manifests or settings.asm_manifests() for row in manifest.read(path)]


def _config(row: KernelRow, target: Target, split: int) -> Config:
    warps, stages = (row.threads or _THREADS) // target.wave_size, row.prefetch or 2
    group_m = manifest.whole_number(row.others.get("group_m", "")) or 1
    sizes = row.tile_m, row.tile_n, row.sub_k, group_m, split, warps, stages
    return Config(row.symbol, *sizes, backend="asm")


def _find_row(config: Config, problem: Problem, target: Target, manifests: Sequence[Path]) -> tuple[KernelRow, bytes]:
    """Return the manifest's row of a config's kernel, and its code or source (empty where the file is missing)."""
    rows = [r for r in _rows(manifests) if r.symbol == config.template]
    if not rows:
        raise InputError(
            f"{config.name}: no manifest holds this kernel; TRITONGEMM_ASM_MANIFESTS or --manifest names them"
        )
    # Of kernels with one name that for the problem goes first.
    rows.sort(key=lambda r: asm_fit.refusal(r, problem, target) is not None)
    codes = [(row, row.path.read_bytes() if row.path.is_file() else b"") for row in rows]
    return next(((r, c) for r, c in codes if _is_for(r, c, target)), codes[0])


def _is_for(row: KernelRow, code: bytes, target: Target) -> bool:
    if row.path.suffix in toolchain.SUFFIXES:
        return True
    try:
        return code_object.arch(code) == target.name
    except InputError:
        return False


def inspect(row: KernelRow, code: bytes, arch: str, wave: int, lds: int) -> tuple[KernelInfo, tuple[Field, ...]]:
    """Return a row's kernel in its code object, and its parameters.

    A row and an object that do not agree, and what is truncated or for another GPU, raise an InputError.
    """
    try:
        found = code_object.arch(code)
        if found != arch:
            raise InputError(f"it is for {found}, not {arch}")
        kernels = {k.symbol: k for k in code_object.read(code)}
    except InputError as error:
        raise InputError(f"{row.where}: {row.path}: {error}") from error
    if row.symbol not in kernels:
        raise InputError(f"{row.where}: {row.object} holds {', '.join(kernels)}")
    kernel = kernels[row.symbol]
    try:
        fields = param_layout.fields(param_layout.declared(row.layout, row.symbol), kernel)
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from None
    if kernel.wave_size != wave:
        raise InputError(f"{row.where}: waves of {kernel.wave_size} threads, the target's have {wave}")
    if kernel.shared + row.lds > lds:
        raise InputError(f"{row.where}: LDS {kernel.shared + row.lds} > {lds} bytes")
    if row.threads > kernel.max_threads:
        raise InputError(f"{row.where}: {row.threads} threads, the code object allows {kernel.max_threads}")
    return kernel, fields


def _make_launch(built: Artifact, problem: Problem) -> Launch:
    """Return the launch of a compiled kernel on one problem."""
    config, facts = built.config, built.launch
    fields = [Field(str(name), int(offset)) for name, offset in facts["fields"]]
    values = _values(facts["layout"], config, problem)
    read = {"a", "b", "c", "workspace", "semaphore", *(e.name for e in problem.extras)}
    # Those with scales add a bias always: zeros, which is what counters are before and after each launch.
    names = ["semaphore" if f.name == "bias" and facts["layout"] in _GRIDS else f.name for f in fields]
    params = [
        Param("pointer", name if name in read else "") if f.kind == "pointer" else Param(f.kind, values.get(name, 0))
        for f, name in zip(fields, names, strict=True)
    ]
    offsets = [f.offset for f in fields]
    end = offsets[-1] + params[-1].size
    if facts["parameter_bytes"] > end:
        params.append(Param("pad", facts["parameter_bytes"] - end))
        offsets.append(end)
    groups = scaled.groups_along_k(facts["layout"], problem.k, config.split_k)
    tiles = {"m": cdiv(problem.m, config.block_m), "n": cdiv(problem.n, config.block_n), "k": groups, "1": 1}
    grid = [1, 1, 1]
    for axis, letters in enumerate(str(facts["grid"]).replace(" ", "").split(",")):
        for letter in letters:
            grid[axis] *= tiles[letter]
    count = tiles["m"] * tiles["n"]
    counters = COUNTERS if facts["layout"] in LAYOUTS else count
    sizes = {  # bytes
        "workspace": 4 * count * config.split_k * config.block_m * config.block_n if config.split_k > 1 else 0,
        "semaphore": 4 * (problem.n if facts["layout"] in _GRIDS else counters),
    }
    return Launch(
        path=built.path,
        symbol=built.symbol,
        grid=(grid[0], grid[1], grid[2]),
        block=(built.threads, 1, 1),
        shared=facts["dynamic_shared"],
        params=tuple(params),
        buffers=tuple(Buffer(n, size) for n, size in sizes.items() if n in names and size),
        at=tuple(offsets),
        # Into which the workgroups that share a tile add their sums.
        zeroed=(Buffer("c", problem.m * problem.n * problem.c.type.bytes),)
        if facts["layout"] in scaled.LAYOUTS and config.split_k > 1
        else (),
        sha256=built.sha256,
    )


def _values(layout: str, config: Config, problem: Problem) -> dict[str, Any]:
    """Return the numbers a layout's fields take, strides in its own unit; fields not named are zero."""
    lda, ldb, ldc = problem.leads
    a, b, c = (problem.a.type.bytes, problem.b.type.bytes, problem.c.type.bytes) if layout == "bf16" else (1, 1, 1)
    values: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "alpha": 1.0, "beta": 0.0}
    values |= {"stride_a0": lda * a, "stride_b0": ldb * b, "stride_c0": ldc * c, "stride_c_in0": ldc * c}
    values |= {"lda": lda, "ldb": ldb, "ldc": ldc * (problem.c.type.bytes if layout in _GRIDS else 1)}
    values |= {"group_m": config.group_m, "split_k": config.split_k, "log2_split_k": config.split_k.bit_length() - 1}
    values |= {"c_is_bf16": int(problem.c.dtype == "bf16"), "add_bias": int(problem.bias != "none")}
    if layout == "fp8_blockscale":
        values |= {
            "scale_m": problem.m,
            "scale_n": cdiv(problem.n, SCALED_BLOCK),
            "scale_k": cdiv(problem.k, SCALED_BLOCK),
        }
    if layout == "fp4":
        groups = cdiv(problem.k, MX_DEPTH)
        values |= {"stride_scale_a0": groups, "stride_scale_b0": groups}
    return values
