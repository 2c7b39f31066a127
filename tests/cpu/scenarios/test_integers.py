import re
from pathlib import Path

import pytest

from tests.support.nouns import Config, Family, KernelBackend, Patch, Problem, apart, heavy, matrices, registry, space
from tritongemm.backends.triton import assembly_edits, compiling
from tritongemm.codegen import modules
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.search.pruning.prune import prune
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerProcess

SM90 = target_files.load_target("sm90")
SWAPPED = (("swap_ab", 1),)
PAIR = Config("ws_tma", 64, 64, 128, 4, num_warps=4, num_stages=4, options=(("pair", 1),))
WIDE = Config("ws_tma", 128, 256, 128, 4, num_warps=8, num_stages=4)
SPLIT = Config("ws_tma_swapped", 40, 64, 128, 1, 2, num_warps=4, num_stages=3, options=SWAPPED)
INTERPRETED = (
    Config("tma", 16, 32, 32, 2, 2),
    Config("tma", 16, 32, 32, 1, 3, options=(("poll", 1), *SWAPPED)),
    Config("persistent", 32, 32, 64, options=(("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 32, 32, 32, options=(("num_sms", 5),)),
)


def integers(family: str, m: int, n: int, k: int, scales: str = "", bias: str = "none") -> Problem:
    result = "int32" if family == "dense" else "fp32"
    found = registry.get(Family, family)
    return found.problem(Problem(m, n, k, *matrices("int8", c=result, layout="TN"), bias=bias), scales)


def matrix_instructions(config: Config, problem: Problem, patch: Patch) -> tuple[set[str], int]:
    seen: list[str] = []
    edit = assembly_edits.edit

    def note(text: str) -> str:
        seen.append(edit(text))
        return seen[-1]

    patch.setattr(assembly_edits, "edit", note)
    triton = registry.get(KernelBackend, "triton")
    assert triton.check(config, problem, SM90)
    built = compiling.compile_job(triton.compile_job(config, problem, SM90))[0]
    assert (built.status, built.spills) == ("ok", 0), built.reason
    (edited,) = seen  # a second text would be one without edits
    launch = triton.launch(built, problem, SM90)
    return set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", edited)), getattr(launch, "cluster", 0)


@apart(
    heavy("dense", "", PAIR, {"m64n64k32"}, 2),
    heavy("a8w8", "row", PAIR, {"m64n64k32"}, 2),
    heavy("a8w8", "row", SPLIT, {"m64n32k32", "m64n8k32"}, 1),
    ("a8w8_blockscale", "block", SPLIT, {"m64n32k32", "m64n8k32"}, 1),
)
def test_matrix_units_add_int32(
    family: str, scales: str, config: Config, forms: set[str], cluster: int, /, monkeypatch: Patch
) -> None:
    problem = integers(family, 1000, 768, 1024, scales=scales, bias="n")
    assert matrix_instructions(config, problem, monkeypatch) == ({f"{form}.s32.s8.s8" for form in forms}, cluster)


def test_wide_tiles_are_multiplied_in_halves() -> None:
    """The compiler knows no instruction of integers with 256 columns, and would die."""
    problem = integers("a8w8", 4096, 4096, 7168, scales="row")
    triton = registry.get(KernelBackend, "triton")
    constants = triton.compile_job(WIDE, problem, SM90).identity["constants"]
    assert (constants["BLOCK_N"], constants["TAIL"]) == (256, 128)
    refused = triton.check(Config("ws_tma", 128, 288, 128, 4, num_warps=8, num_stages=2), problem, SM90)
    assert refused.reason == "a part of a tile of integers must have at most 128 columns"
    few = integers("a8w8", 128, 1024, 1024, scales="row")
    kept = prune(space(few, SM90, templates=("ws_tma",)), few, SM90).kept
    assert 256 in {c.block_n for c in kept} and all(triton.check(c, few, SM90) for c in kept)


@pytest.mark.parametrize("family", [*(heavy(f) for f in ("dense", "a8w8")), "a8w8_blockscale"])
def test_the_copy_engines_templates_are_exact(interpreter: WorkerProcess, tmp_path: Path, family: str) -> None:
    """Sums to the last bit; with scales, what float32 rounds of the exact sum times its factors."""
    problem = integers(family, 40, 48, 160, bias="n")
    text = modules.write_candidates(problem, INTERPRETED, SM90, tmp_path).read_text()
    for config in INTERPRETED:
        ((error, tolerance),) = interpreter.ask(InterpreterJob(problem, config, text), 60)
        assert error <= (0 if family == "dense" else 1e-6) <= tolerance, config.name
