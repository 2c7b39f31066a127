"""Generated modules as Triton's own launcher compiles them, which makes constants of arguments that are 1."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launched_modules import launches_for
from tests.support.module_cases import CASES
from tests.support.nouns import Config, Family, Problem, Target, WeightLayout, fails, heavy, matrices, registry
from tritongemm.codegen import modules, render, template_facts
from tritongemm.search_spaces import loader as target_files

TARGETS = {name: target_files.load_target(name) for name in ("sm90", "gfx942", "gfx950")}
QUICK = [("sm90", "grouped bf16"), ("gfx950", "fp4")]
RUNS = [
    *((*run, "a config of each template") for run in QUICK),
    *(heavy(target, case, "all") for target in TARGETS for case in CASES if target == "sm90" or CASES[case].anywhere),
]
# Without edits its tiles are narrower, as the registers of twelve warps do not hold sums of 256 columns.
TWELVE_WARPS = Config("ws_tma", 192, 192, 64, 1, 1, 12, 3)


def test_every_template_is_launched_here() -> None:
    assert {c.template for case in CASES.values() for c in case.configs} == set(template_facts.names())


def configs_of(case: str, target: Target) -> list[Config]:
    """Those of a case that a target can run, each tile row a group of its own."""
    known = [c for c in CASES[case].configs if target.has("tma") or "tma" not in c.template]
    return list(dict.fromkeys(replace(c, group_m=1) for c in known))


def operands(problem: Problem) -> dict[str, Any]:
    return registry.get(Family, problem.family).make_inputs(problem, "cpu")


def work(text: str) -> tuple[Counter[str], set[str]]:
    """How often a kernel has each operation, in whatever order, and its constants."""
    operations = re.findall(
        r"(?:= |^ *)\"?((?:tt|ttg|ttng|scf|arith|math|gpu|llvm|cf|nvgpu|amdg?)\.[\w.]+)", text, re.M
    )
    left_out = ("arith.constant", "scf.yield", "tt.func", "tt.return")
    return Counter(o for o in operations if o not in left_out), set(re.findall(r"arith\.constant (.*)", text))


@pytest.mark.parametrize(("target", "case", "which"), RUNS)
def test_modules_compile_where_arguments_are_one(target: str, case: str, which: str, tmp_path: Path) -> None:
    """Imported, on a row of A, tiles in groups of a row; a winner's kernel is the candidate's with its constants."""
    facts, problem = TARGETS[target], CASES[case].problem
    configs = configs_of(case, facts)
    configs = configs if which == "all" else [*{config.template: config for config in configs}.values()]
    # Groups have a row too, and columns of A must begin at multiples of 16 bytes for the copy engine.
    one = problem if problem.groups is not None else problem.at(1 if problem.a.row_major else 8)
    module = modules.run_text(render.module(problem, configs, facts, 0.1, 1.0), "generated")
    c = torch.empty(one.operands["c"].extents, dtype=getattr(torch, one.c.type.torch))
    with launches_for(facts, tmp_path) as made:
        for config in configs:
            module.launch(config.name, **operands(one), c=c)
            winner = render.winner(problem, config, facts, "Remark.")
            assert max(map(len, winner.splitlines())) <= 120
            result = modules.run_text(winner, "gemm").matmul(**operands(one))
            assert (result.shape, result.dtype) == (c.shape, c.dtype)
    candidates, winners = made[::2], made[1::2]
    assert all(config.name in text for config, text in zip(configs, candidates, strict=True))
    for config, candidate, winner in zip(configs, candidates, winners, strict=True):
        assert work(winner) == work(candidate), config.name


@pytest.mark.parametrize("target", ["sm90", *(heavy(t) for t in ("gfx942", "gfx950"))])
def test_sizes_and_strides_of_one_compile(target: str, tmp_path: Path) -> None:
    facts = TARGETS[target]
    problem = registry.get(Family, "dense").problem(Problem(1, 1, 1, *matrices("bf16", layout="TN")))
    configs = [c for c in configs_of("bf16", facts) if not template_facts.kernel_template(c.template).descriptors]
    module = modules.run_text(render.module(problem, configs, facts, 0.1, 1.0), "generated")
    with launches_for(facts, tmp_path) as made:
        for config in configs:
            module.launch(config.name, **operands(problem), c=torch.empty(1, 1, dtype=torch.bfloat16))
    assert len(made) == len(configs)


@pytest.mark.parametrize("row_major_a", [True, False])
def test_rows_too_far_apart_for_offsets_of_32_bits_are_refused(row_major_a: bool) -> None:
    """The kernel would read beyond its operand: offsets inside a tile are added to its corner in 32 bits."""
    problem, config = Problem(16, 16, 64, *matrices(layout="NT"[row_major_a] + "T")), Config("tile", 16, 16, 64)
    module = modules.run_text(render.module(problem, [config], TARGETS["sm90"], 0.1, 1.0), "generated")
    rows = 16 if row_major_a else 64
    a = torch.empty(2**31, dtype=torch.float16, device="meta").as_strided((rows, 80 - rows), (2**31 // rows, 1))
    a = a if row_major_a else a.T
    b, c = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((64, 16), (16, 16)))
    with pytest.raises(ValueError, match=f"^BLOCK_. {rows} of rows {2**31 // rows} elements apart: offsets in a tile"):
        module.launch(config.name, a, b, c)
    winner = modules.run_text(render.winner(problem, config, TARGETS["sm90"], "Remark."), "gemm")
    fails(ValueError, f"^rows of a {2**31 // rows} elements apart: offsets in a tile", winner.matmul, a, b)


@pytest.mark.heavy
@pytest.mark.parametrize("target", TARGETS)
def test_winners_compile_to_binaries(target: str, tmp_path: Path) -> None:
    """To the end, a kernel of each template, at the tuned size and at a row."""
    facts, problem = TARGETS[target], CASES["bf16"].problem
    cases = ("bf16", "bf16, copy engine") if facts.has("tma") else ("bf16",)
    configs = [*{c.template: c for case in cases for c in configs_of(case, facts)}.values()]
    if facts.has("tma"):
        configs.append(TWELVE_WARPS)
    with launches_for(facts, tmp_path, binary=True) as made:
        for config in configs:
            # A text of its own: kernels of one that another test has run would not be compiled again.
            module = modules.run_text(render.winner(problem, config, facts, "A binary."), "gemm")
            for size in (problem, problem.at(1)):
                module.matmul(**operands(size))
    assert len(made) == 2 * len(configs)


@pytest.mark.parametrize(
    "config",
    [
        Config("ws_tma", 256, 176, 64, 1, 1, 8, 3, (("epilogue_parts", 2),)),
        TWELVE_WARPS,
        Config("ws_tma_swapped", 192, 256, 64, 1, 2, 8, 3, (("epilogue_parts", 4), ("swap_ab", 1))),
    ],
    ids=["wide", "twelve warps", "swapped"],
)
def test_a_winner_fits_shared_memory_without_the_edits_that_shrink_its_slots(config: Config, tmp_path: Path) -> None:
    problem, facts = Problem(1024, 1024, 512, *matrices("bf16", layout="TN")), TARGETS["sm90"]
    with launches_for(facts, tmp_path) as made:
        modules.run_text(render.winner(problem, config, facts, "Remark."), "gemm").matmul(**operands(problem))
    allocated = re.findall(r"local_alloc\b.*memdesc<([\dx]+)x(bf16|f32|i64),", made[0])
    sizes = [math.prod(map(int, dims.split("x"))) * {"bf16": 2, "f32": 4, "i64": 8}[dtype] for dims, dtype in allocated]
    assert facts.lds_bytes * 0.7 < sum(sizes) <= facts.lds_bytes
    assert (render.without_edits(config, problem, facts.compute_units) == config) == (config is not TWELVE_WARPS)


@pytest.mark.parametrize("case", ["int4 in fragments", "fp4 in fragments"])
def test_a_module_puts_weights_into_the_order_of_fragments(case: str) -> None:
    problem = CASES[case].problem
    text = render.module(problem, [CASES[case].configs[0]], TARGETS["sm90"], 0.1, 1.0)
    winner = render.winner(problem, CASES[case].configs[0], TARGETS["sm90"], "Remark.")
    packed = torch.randint(0, 256, (48, 128), dtype=torch.uint8).mT
    for one in (text, winner):  # a winner's caller needs it too
        found = modules.run_text(one, "generated").in_fragments(packed)
        assert torch.equal(found, registry.get(WeightLayout, "fragments").pack(packed))
    assert "b = in_fragments(b)" in text
