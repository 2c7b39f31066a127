"""Kernels for GPUs on which none has run yet: Triton compiles them to the target's own matrix instructions."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tritongemm.cli import tune
from tritongemm.core.artifact import LoopFacts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.formats import Defaults, make_problem
from tritongemm.hip_ext.binaries import code_object, kernel_loops
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space
from tritongemm.search_spaces.loader import load_target

TRITON = registry.get(KernelBackend, "triton")
NAMES = {
    "sm103": "GB300",
    "sm120": "rtx5090",
    "sm121": "GB10",
    "gfx1151": "Strix Halo",
    "gfx1201": "R9700",
    "gfx1250": "MI455X",
}
FORMS: list[dict[str, Any]] = [
    {"dtype_a": "bf16"},
    {"dtype_a": "fp32"},
    {"dtype_a": "bf16", "groups": 4},
    {"dtype_a": "int8", "family": "a8w8", "bias": "n"},
    {"dtype_a": "fp8", "family": "a8w8", "dtype_c": "bf16"},
    {"dtype_a": "fp8", "dtype_c": "fp8"},
    {"dtype_a": "fp8", "family": "a8w8_blockscale"},
    {"dtype_a": "fp8e4m3fn", "family": "a8w8_blockscale", "scales": "mx"},
    {"dtype_a": "fp4e2m1", "family": "a4w4_blockscale", "scales": "mx"},
    {"dtype_a": "bf16", "family": "a16w4", "dtype_b": "int4"},
]  # fmt: skip


def problem_of(target: Target, m: int, n: int, k: int, **given: Any) -> Problem:
    given = {"dtype_b": given["dtype_a"], "row_major_b": False, **given}
    return make_problem(Defaults(fp8_encoding=target.fp8), m, n, k, given)


@pytest.mark.parametrize(
    ("arch", "given", "instruction"),
    [
        ("sm120", FORMS[8], r"mma\.sync\.aligned\.m16n8k64\S*block_scale\S*e2m1\.e2m1"),
        ("gfx1250", FORMS[7], r"v_wmma_scale_f32_16x16x128_f8f6f4"),
        ("gfx1201", FORMS[4], r"v_wmma_f32_16x16x16_fp8_fp8"),
        pytest.param("gfx1151", FORMS[0], r"v_wmma_f32_16x16x16_bf16", marks=pytest.mark.heavy),
        pytest.param("sm121", FORMS[7], r"mma\.sync\S*block_scale\S*e4m3", marks=pytest.mark.heavy),
        pytest.param("sm103", FORMS[0], r"tcgen05\.mma", marks=pytest.mark.heavy),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_products_are_made_by_its_instructions(
    monkeypatch: pytest.MonkeyPatch, arch: str, given: dict[str, Any], instruction: str
) -> None:
    assembly, measure, target = dict[str, LoopFacts | None](), kernel_loops.measure, load_target(arch)
    monkeypatch.setattr(kernel_loops, "measure", lambda text: assembly.setdefault(text, measure(text)))
    side = 128 if arch == "sm103" else 32
    config = Config("tile", side, side, 128 if "scales" in given else 64, num_warps=4 if arch == "sm103" else 1)
    built, code, _ = TRITON.compile(TRITON.compile_job(config, problem_of(target, 64, 64, 256, **given), target))
    assert (built.status, built.spills) == ("ok", 0) and re.search(instruction, next(iter(assembly)))
    assert built.loop and built.loop.matrix > 0 and built.loop.loads > 0 and not built.loop.spilled
    (kernel,) = code_object.read(code)
    assert (code_object.arch(code), kernel.wave_size) == (arch, 32)


@pytest.mark.heavy
@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("given", FORMS, ids=lambda given: "-".join(map(str, given.values())))
def test_each_template_compiles(arch: str, given: dict[str, Any]) -> None:
    """The best predicted of each template that a target's space has, and the smallest."""
    target = load_target(arch)
    if given["dtype_a"] == "fp8" and target.fp8 == "none":
        return
    problem = problem_of(target, 100, 512, 1024, **given)
    assert registry.get(Family, problem.family).supports(problem, target)
    ordered = [p.config for p in rank(prune(space(problem, target), problem, target).kept, problem, target)]
    first: dict[str, list[Config]] = {}
    for config in (*ordered, *sorted(ordered, key=lambda c: c.block_m * c.block_n * c.block_k)):
        first.setdefault(config.template, []).append(config)
    for template, configs in first.items():
        chosen = dict.fromkeys((configs[0], configs[len(configs) // 2]))
        made = [TRITON.compile(TRITON.compile_job(config, problem, target))[0] for config in chosen]
        assert {a.status for a in made} <= {"ok", "out_of_resources"}, (template, [a.reason for a in made])
        assert "ok" in {a.status for a in made}, (template, [a.reason for a in made])


@pytest.mark.heavy
@pytest.mark.parametrize(("arch", "name"), NAMES.items())
def test_a_gpu_is_tuned_for_by_its_name(tmp_path: Path, arch: str, name: str) -> None:
    argv = ["-m", "16", "-n", "48", "-k", "160", "--target", name, "--budget", "2", "--num_threads", "1"]
    assert tune.main([*argv, "-o", str(tmp_path / "out.yaml")]) == 0
    (row,) = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert (row["target"], row["timer"]) == (arch, "model")
    assert 0 < row["error"] <= row["tolerance"] and " in the interpreter at " in row["verified"]
