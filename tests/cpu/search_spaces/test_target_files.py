import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.nouns import Defaults, Family, KernelBackend, Patch, Target, load_target, make_problem, registry
from tests.support.refusals import fails, refuses
from tests.support.tables import apart, cases, each, heavy
from tritongemm.cli import tune
from tritongemm.core.artifact import LoopFacts
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TargetError
from tritongemm.core.problem import Problem
from tritongemm.hip_ext.binaries import code_object, kernel_loops
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: Patch) -> Iterator[Write]:
    for path in target_files.SPACES.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(target_files, "SPACES", tmp_path)
    target_files.space_file.cache_clear()

    def write_toy(text: str) -> None:
        (tmp_path / "toy.yaml").write_text(text)
        target_files.space_file.cache_clear()

    yield write_toy
    target_files.space_file.cache_clear()


FACTS = target_files.space_file("gfx942")["target"]


@each("fact", FACTS)
def test_every_fact_is_needed(write: Write, fact: str) -> None:
    write(yaml.safe_dump({"target": {k: v for k, v in FACTS.items() if k != fact}, "templates": {}}))
    refuses(rf"^search_spaces/toy\.yaml: target lacks {fact}$", target_files.load_target, "toy")


GFX942 = "inherit: gfx942\n"
CODE = '"s\\"); import os; os.system(\\"id\\") #\\n"'  # ends the text that it stands in


@cases(
    ("inherit: gfx9\n", "toy.yaml inherits 'gfx9', which is not there"),
    ("- 1\n", "toy.yaml must be a map with the sections target and templates"),
    ("target: {\n", "toy.yaml is not YAML: "),
    ("target: {vendor: amd}\n", "toy.yaml has no section templates, nor has what it inherits"),
    ("inherit: base\n", "toy.yaml: target lacks vendor, product, compute_units, "),
    (GFX942 + "target: {lds: 1}\n", "toy.yaml: target has lds, which nothing reads"),
    (
        GFX942 + "target: {compute_units: many}\n",
        "target: compute_units must be a whole number, not negative, not 'many'",
    ),
    (GFX942 + "target: {hbm_gbps: 0}\n", "target: hbm_gbps must be a positive number, not 0"),
    (GFX942 + "target: {features: tma}\n", "target: features must be a list of names, not 'tma'"),
    (GFX942 + "target: {peak_tflops: {fp16: fast}}\n", "target: peak_tflops must be a map of numbers"),
    (GFX942 + "templates: {mine: {requires: []}}\n", "templates.mine lacks axes"),
    (
        GFX942 + "templates: {mine: {requires: [], axes: {block_m: [16]}}}\n",
        "templates.mine.axes lacks block_n, block_k",
    ),
    (GFX942 + "templates: {tile: {axes: {block_x: [16]}}}\n", "templates.tile.axes has block_x, which nothing reads"),
    (
        GFX942 + "templates: {tile: {axes: {block_m: 16}}}\n",
        "tile.axes: block_m must be a list of whole numbers from 1 on, not 16",
    ),
    (
        GFX942 + "templates: {tile: {options: {kpack: []}}}\n",
        "tile.options: kpack must be a list of whole numbers from 0 on, not []",
    ),
    (GFX942 + "templates: {gemv: {m: 8}}\n", "templates.gemv: m must be two sizes, the least and the most, not 8"),
    (GFX942 + "templates: {tile: {aligned: [d]}}\n", "templates.tile: aligned must be a list of a, b and c, not ['d']"),
    (GFX942 + "devices: [MI308X]\n", "toy.yaml: devices must be a map of maps"),
    (GFX942 + "chips: {MI308X: 1}\n", "toy.yaml: chips must be a list of words"),
    ("inherit: toy\n", "toy.yaml inherits 'toy', which inherits it in turn"),
    ("inherit: ../gfx942\n", "toy.yaml inherits '../gfx942', which is not there"),
    (GFX942 + f"target: {{store_wait: {CODE}}}\n", "target: store_wait must be text of letters, digits, bl"),
    (GFX942 + f"target: {{features: [{CODE}]}}\n", "target: features must be a list of names"),
    (GFX942 + f"target: {{peak_tflops: {{{CODE}: 1}}}}\n", "target: peak_tflops must be a map of numbers"),
    (GFX942 + f"templates: {{tile: {{options: {{{CODE}: [1]}}}}}}\n", "can't be a name; it has small letters"),
)
def test_wrong_files(text: str, complaint: str, /, write: Write) -> None:
    write(text)
    with pytest.raises(InputError) as refused:
        space(Problem(16, 16, 16), target_files.load_target("toy"))
    assert str(refused.value).startswith("search_spaces/toy.yaml") and complaint in str(refused.value)


def test_names_of_gpus_are_answered_and_a_chip_has_figures_of_its_own() -> None:
    fails(TargetError, r"h200; did you mean MI300A or MI300X\?$", target_files.load_target, "mi300")
    found = {name: target_files.load_target(name) for name in ("RTX5090", "RTX PRO 6000", "NVIDIA GB300", "RX 9070 XT")}
    assert [t.product for t in found.values()] == ["RTX 5090", "RTX PRO 6000", "GB300", "RX 9070 XT"]
    assert found["RTX5090"].compute_units == 170 and found["RTX5090"].lds_bytes == found["RTX PRO 6000"].lds_bytes


@each("name", ["../search_spaces/gfx942", "tune_gemm", "base", "gfx942.yaml", "./gfx942", "", "../elsewhere/evil"])
def test_a_target_is_a_name_of_the_list_and_no_path(write: Write, name: str) -> None:
    """A file that is stored elsewhere is not read, nor is one here that is no target."""
    elsewhere = target_files.SPACES.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "evil.yaml").write_text((target_files.SPACES / "gfx942.yaml").read_text())
    fails(TargetError, r"unknown target '.*'; there are: gfx1100, ", target_files.load_target, name)
    fails(TargetError, "unknown target", target_files.space_file, "../elsewhere/evil")


@cases(
    ("NVIDIA_H200", "sm90"),
    ("NVIDIA H20-3e", "sm90"),
    ("NVIDIA_A100-SXM4-80GB", "sm80"),
    ("NVIDIA B200", "sm100"),
    ("NVIDIA_RTX_6000_Ada_Generation", "sm89"),
    ("NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition", "sm120"),
    ("RTX PRO 6000", "sm120"),
    ("rtx5090", "sm120"),
    ("NVIDIA RTX 6000D", ""),
    ("NVIDIA_GB10", "sm121"),
    ("NVIDIA GB300", "sm103"),
    ("AMD Radeon AI PRO R9700", "gfx1201"),
    ("AMD_Radeon_RX_9070_XT", "gfx1201"),
    ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "gfx1151"),
    ("strix-halo", "gfx1151"),
    ("AMD Instinct MI455X", "gfx1250"),
    ("AMD Radeon PRO W7900", "gfx1100"),
    ("AMD_Instinct_MI325_OAM", "gfx942"),
    ("AMD Instinct MI355X", "gfx950"),
    ("gfx942:sramecc+:xnack-", "gfx942"),
    ("AMD_Radeon_Graphics", ""),
    ("../../gfx942.yaml H200", ""),
    ("", ""),
)
def test_the_target_of_a_device(device: str, target: str, /, write: Write) -> None:
    write("inherit: gfx942\n")  # whose chips are not those of what it inherits
    assert target_files.target_of_device(device) == target


TRITON = registry.get(KernelBackend, "triton")
NAMES = {
    "sm103": "GB300", "sm120": "rtx5090", "sm121": "GB10", "gfx1151": "Strix Halo", "gfx1201": "R9700",
    "gfx1250": "MI455X",
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"dtype_a": "bf16"}, {"dtype_a": "fp32"}, {"dtype_a": "bf16", "groups": 4},
    {"dtype_a": "int8", "family": "a8w8", "bias": "n"}, {"dtype_a": "fp8", "family": "a8w8", "dtype_c": "bf16"},
    {"dtype_a": "fp8", "dtype_c": "fp8"}, {"dtype_a": "fp8", "family": "a8w8_blockscale"},
    {"dtype_a": "fp8e4m3fn", "family": "a8w8_blockscale", "scales": "mx"},
    {"dtype_a": "fp4e2m1", "family": "a4w4_blockscale", "scales": "mx"},
    {"dtype_a": "bf16", "family": "a16w4", "dtype_b": "int4"},
]  # fmt: skip


def problem_of(target: Target, m: int, n: int, k: int, **given: Any) -> Problem:
    given = {"dtype_b": given["dtype_a"], "row_major_b": False, **given}
    return make_problem(Defaults(fp8_encoding=target.fp8), m, n, k, given)


@apart(
    ("sm120", FORMS[8], r"mma\.sync\.aligned\.m16n8k64\S*block_scale\S*e2m1\.e2m1"),
    ("gfx1250", FORMS[7], r"v_wmma_scale_f32_16x16x128_f8f6f4"),
    ("gfx1201", FORMS[4], r"v_wmma_f32_16x16x16_fp8_fp8"),
    heavy("gfx1151", FORMS[0], r"v_wmma_f32_16x16x16_bf16"),
    heavy("sm121", FORMS[7], r"mma\.sync\S*block_scale\S*e4m3"),
    heavy("sm103", FORMS[0], r"tcgen05\.mma"),
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_its_instructions_are_used(arch: str, given: dict[str, Any], instruction: str, /, monkeypatch: Patch) -> None:
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
