import ast
import itertools
import os
import re
import subprocess
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import forked
from tests.support.covering import pairwise
from tests.support.kernel_cases import (
    DESCRIBED,
    FRAGMENTS,
    FRAGMENTS_OF_GROUPS,
    GEMV,
    GFX942,
    GLUON,
    GROUPED,
    PLAIN,
    POINTERS,
    SM90,
    SPLIT,
    STREAM,
    TMA_SWAPPED,
    WS_FRAGMENTS,
)
from tests.support.nouns import Config, Defaults, InputError, Patch, Record, make_problem, registry, space
from tests.support.tables import apart, cases, each
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.codegen import fact_sections, geometry, modules, render, template_facts
from tritongemm.codegen.specialised_text import specialise
from tritongemm.core import target
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.binaries import code_object
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.search.pruning.rules import RULES
from tritongemm.search_spaces import loader as target_files

FAMILY = types.SimpleNamespace(tolerance=0.01, input_deviation=1.0)


def text_of(problem: Problem, configs: list[Config], target: target.Target = GFX942) -> str:
    return render.module(problem, configs, target, FAMILY.tolerance, FAMILY.input_deviation)


def environment(**more: str) -> dict[str, str]:
    """The environment of someone who does not have this package on the path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""} | more


def test_every_template_is_tried_and_files_are_named_by_their_problem() -> None:
    assert {rule.group for rule in RULES} - {""} == fact_sections.RULE_GROUPS, "what a template's header can name"
    in_fragments = (*FRAGMENTS, *FRAGMENTS_OF_GROUPS, WS_FRAGMENTS)
    assert {c.template for c in (*POINTERS, *DESCRIBED, *GLUON, *GROUPED, *in_fragments)} == set(template_facts.names())
    assert render.module_name(Problem(16, 32, 64)) == "generated_kernel_16_32_64"
    others = [
        Problem(16, 32, 64, *matrices(layout="TN")),
        Problem(16, 32, 64, *matrices(c="fp32")),
        Problem(16, 32, 64, bias="n"),
        Problem(16, 32, 64, batch=2),
    ]
    assert len({render.module_name(p) for p in [Problem(16, 32, 64), *others]}) == 5
    assert all(render.module_name(p).isidentifier() for p in others)
    with pytest.raises(
        InputError, match="no kernel template is called 'abacus'; there are: fragments, gemv, grouped, grouped_f"
    ):
        text_of(Problem(16, 16, 16), [Config("abacus", 1, 1, 1)])


def test_parts_of_kernels_begin_with_what_is_in_them() -> None:
    """A file that kernel templates import says so in full sentences, before any other text."""
    parts = sorted((template_facts.TEMPLATES / "kernels").glob("_*.j2"))
    assert len(parts) > 20
    silent = [part.name for part in parts if not re.match(r"\{#- [A-Z][^#]{40,}\. -#\}\n", part.read_text())]
    assert not silent


@cases(
    ("overlap: [ahead]", r"the header has overlap, which nothing reads; it can have .*launch_options, "),
    ("kinds: [won]", r"kinds has won; there are: one, batched, grouped$"),
    ("constexprs: [poll]\ndefaults: {pol: 0}", r"defaults has pol; there are: poll$"),
    ("search: {rules: [vectr]}", r"search\.rules has vectr; there are: .*vector"),
    ("kinds: [one", r"the header is not YAML: "),
    ("kinds:", r"kinds must be a list$"),
    ("search: {rules: }", r"search\.rules has None; "),
    ("inherit: _toy", r"inherit must name another file beside it, without \.yaml; not _toy$"),
    ("---#}{{ missing() }}{#", r"or what it imports: 'missing' is undefined$"),
    ("---#}{{ p. }}{#", r"line 4: expected name or number$"),
)
def test_a_template_with_a_mistake_is_refused(facts: str, why: str, /, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "toy.j2").write_text(f"{{#---\nsummary: a toy\ngrid: [1, 1, 1]\n{facts}\n---#}}\n")
    monkeypatch.setattr(template_facts, "TEMPLATES", tmp_path)
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    caches = (render._environment, template_facts.kernel_template, template_facts._has_constant)
    for cache in caches:
        cache.cache_clear()
    with pytest.raises(InputError, match=rf"^templates/kernels/toy\.j2.*[:,] {why}"):
        render.kernel_source(Problem(16, 16, 16), "toy", GFX942)
    for cache in caches:
        cache.cache_clear()


DTYPES = (("fp16",) * 3, ("bf16", "bf16", "fp32"), ("fp32",) * 3, ("int8", "int8", "int32"), ("int8",) * 3)
FORMS = ((True, "none"), (False, "m"), (True, "n"))


KINDS = pairwise(["gfx942", "gfx950", "sm80", "sm90"], DTYPES, FORMS)


@apart(*[pytest.param(*case, marks=() if i % 3 == 0 else pytest.mark.heavy) for i, case in enumerate(KINDS)])
def test_modules_of_all_kinds_are_python(target: str, dtypes: tuple[str, str, str], form: tuple[bool, str], /) -> None:
    facts, (row_a, bias) = target_files.load_target(target), form
    configs = [*POINTERS, *((*DESCRIBED, *GLUON) if facts.has("tma") else ())]
    text = text_of(
        Problem(33, 48, 80, *matrices(*dtypes, layout="NT"[row_a] + "NT"[not row_a]), bias=bias), configs, facts
    )
    tree = ast.parse(text)
    assert ast.get_docstring(tree, clean=True).startswith("C[33, 48] = A[33, 80] @ B[80, 48]")  # type: ignore[union-attr]
    assert {c.template for c in configs} <= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert "{{" not in text and "{%" not in text and "tritongemm." not in text.replace("tritongemm.\n", "")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE), "no trailing blanks"
    beside_configs = re.sub(r'(?s)(?<=\nCONFIGS = ).*?""".splitlines', "", text)  # which take a line each
    assert not [line for line in beside_configs.splitlines() if len(line) > 120]


DESCRIBED_BY = {  # a size's family, scales and epilogue, and what its winner's docstring says of operands
    ("a16w4", "weight_16", "none"): r"b: \[K / 2, N\], .* earlier along K in the low half; .* as \[cdiv\(K, 16\), N\]",
    ("a16w4", "weight_128_zeros", "none"): r"int4 plus 8.* zero points less 8, as \[cdiv\(K, 128\), 2, N\]",
    ("a4w4_blockscale", "mx", "none"): r"a: \[M, K / 2\], .* as \[M, cdiv\(K, 32\)\]; 2 \*\* \(byte - 127\)",
    ("a8w8_blockscale", "block_tma", "none"): r"as \[cdiv\(K, 128\), cdiv\(M, 4\) \* 4\]",
    (
        "dense",
        "",
        "silu_mul_block",
    ): r"8 columns of gate, then 8 of up, .* silu\(gate\) \* up\. block divides each 128 columns",
}


@each("case", list(DESCRIBED_BY))
def test_a_winner_says_how_its_operands_are_stored(case: tuple[str, str, str]) -> None:
    """A caller has neither this package nor its documentation."""
    family, scales, epilogue = case
    asked = Defaults.of("bf16" * (family == "dense"), layout="TN", family=family, scales=scales, epilogue=epilogue)
    text = render.winner(make_problem(asked, 16, 512, 512), Config("tile", 16, 256, 128), SM90, "Remark.")
    assert re.search(DESCRIBED_BY[case], " ".join(text.split())) and max(map(len, text.splitlines())) <= 120


def test_the_next_kernel_starts_early_but_behind_gate_and_up() -> None:
    """There it took up to a third longer."""
    plain = Problem(16, 512, 512, *matrices("bf16", layout="TN"))
    for config in (PLAIN, *DESCRIBED, *GLUON):
        found = [text_of(replace(plain, epilogue=one), [config], SM90) for one in ("none", "silu", "silu_mul")]
        starts = ["griddepcontrol.launch_dependents" in text for text in found]
        assert starts[0] == starts[1] and not starts[2], config.name
        assert "griddepcontrol.wait" in found[2]


PAIRS = '''"""A module."""
from collections import namedtuple

import triton

Pair = namedtuple("Pair", "left right WIDE LESS")


@triton.jit
def add(pair):
    if pair.WIDE > 0:
        return pair.left + pair.right
    else:
        return pair.left * (pair.LESS + 2)


@triton.jit
def kernel(x, y, WIDE: tl.constexpr):
    spare = x if WIDE == 0 else unknown(y)
    add(Pair(x, spare, WIDE, 3))


def matmul(x, y):
    kernel(x, y, WIDE=0)
'''


def test_named_tuples_of_winners_have_the_fields_that_are_read() -> None:
    """Constants in them are decided; what only fields that nothing reads would hold is left out."""
    narrow = specialise(PAIRS, ["matmul"], {"WIDE": 0})
    assert 'Pair = namedtuple("Pair", "left")' in narrow and "return pair.left * 5" in narrow
    assert "def kernel(x):\n    add(Pair(x))\n" in narrow and "kernel(x)\n" in narrow
    wide = specialise(PAIRS.replace("WIDE=0", "WIDE=1"), ["matmul"], {"WIDE": 1})
    assert "    spare = unknown(y)\n    add(Pair(x, spare))" in wide and "return pair.left + pair.right" in wide


def test_two_types_of_fp8_are_widened_where_the_compiler_mixes_them_up() -> None:
    mixed = text_of(Problem(33, 48, 80, *matrices("fp8e5m2fnuz", "fp8e4m3fnuz", "fp32")), [PLAIN])
    scope: dict[str, object] = {
        "triton": types.SimpleNamespace(__version__="3.6.0"),
        "tl": types.SimpleNamespace(constexpr=bool),
    }
    (line,) = (part for part in mixed.splitlines() if part.startswith("FP8_PAIRS"))
    for version, multiplies in (("3.6.0", False), ("3.7.1", True), ("3.10.0+git1", True)):
        scope["triton"] = types.SimpleNamespace(__version__=version)
        exec(line, scope)
        assert scope["FP8_PAIRS"] is multiplies
    assert "a.to(a.dtype if FP8_PAIRS else tl.float16)" in mixed
    alike = text_of(Problem(33, 48, 80, *matrices("fp8e5m2fnuz", c="fp32")), [PLAIN])
    other = text_of(Problem(33, 48, 80, *matrices("fp8e5m2", "fp8e4m3fn", "fp32")), [PLAIN], SM90)
    assert "FP8_PAIRS" not in alike + other


sizes = st.integers(1, 5000)


@given(sizes, sizes, sizes, st.sampled_from([*POINTERS, *DESCRIBED, *GLUON]))
def test_a_grid_is_written_down_once(m: int, n: int, k: int, config: Config) -> None:
    """What the pipeline launches is what the module launches."""
    problem = Problem(m, n, k)
    ours = geometry.geometry(config, problem, SM90.compute_units)
    scope = geometries()
    constants = {k: v for k, v in geometry.constants(config, problem).items() if k not in ("CONFIG", "EVEN_K")}
    constants["GROUP_M"] = config.group_m
    grid, workspace, semaphores = scope[f"geometry_{config.template}"](m, n, k, **constants)
    assert (tuple(grid), 4 * workspace, 4 * semaphores) == (ours.grid, ours.workspace_bytes, ours.semaphore_bytes)
    assert all(x >= 1 for x in ours.grid)


def geometries(made: dict[str, object] = {}) -> dict:  # type: ignore[type-arg]  # noqa: B006 (made once)
    if not made:
        tree = ast.parse(text_of(Problem(1, 16, 16), [*POINTERS, *DESCRIBED, *GLUON], SM90))
        tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("geometry_")]
        made.update(cdiv=lambda a, b: -(-a // b), COMPUTE_UNITS=SM90.compute_units)
        exec(compile(tree, "generated", "exec"), made)
    return made


@dataclass(frozen=True)
class Runs:
    right: subprocess.CompletedProcess[str]
    others: subprocess.CompletedProcess[str]


OTHERS = """
import runpy, sys, torch
sys.path.insert(0, {folder!r})
from {module} import matmul
from {bf16} import matmul as multiply_bf16
torch.manual_seed(0)
a, b = torch.randn(5, 33).bfloat16(), torch.randn(33, 70).bfloat16()
exact = a.double() @ b.double()
error = ((multiply_bf16(a, b) - exact).abs() / exact.abs().clamp_min(1)).max().item()
assert error < 0.01, error  # Triton's interpreter alone would multiply the bits of bf16
for m, n, k in ((5, 70, 33), (16, 16, 16), (1, 1, 1)):
    a, b, bias = torch.randn(m, k).half(), torch.randn(n, k).half().T, torch.randn(n).half()
    error = (matmul(a, b, bias).double() - (a.double() @ b.double() + bias.double())).abs().max().item()
    assert error < 0.02, error
wide, deep = torch.randn(9, 4).half(), torch.randn(9, 1).half()
for bad in ((a.float(), b, bias), (wide.T, deep, bias), (a.expand(1, 2), b, bias), (a, b, torch.randn(2).half())):
    try:
        matmul(*bad)
    except ValueError as error:
        print(error)
print("right")
for name, *words in (("refused",), ("spoiled", "--config", {config!r})):
    sys.argv = [name, *words]
    try:
        runpy.run_path({folder!r} + f"/{{name}}.py", run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("modules")
    problem = Problem(33, 20, 40, *matrices(layout="TN"), bias="n")
    module = modules.write_candidates(problem, [PLAIN, SPLIT, STREAM], GFX942, folder)
    text = module.read_text()
    spoiled = text.replace("acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b, acc) + 1")
    assert spoiled != text
    (folder / "spoiled.py").write_text(spoiled)
    (folder / "refused.py").write_text(text.replace("acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b, acc) + unknown"))
    record = Record(problem, "gfx942", SPLIT, "triton", 1.25e-5, 0.0, "model")
    winner = modules.write_winner(record, GFX942, folder)
    bf16 = modules.write_winner(replace(record, problem=Problem(33, 20, 40, *matrices("bf16"))), GFX942, folder)
    script = OTHERS.format(folder=str(folder), module=winner.stem, bf16=bf16.stem, config=PLAIN.name)
    return Runs(
        right=forked.run([str(module)], folder, environment()),
        others=forked.run(["-c", script], folder, environment(TRITON_INTERPRET="1")),
    )


def test_modules_verify_themselves_without_a_gpu_and_winners_stand_alone(runs: Runs) -> None:
    assert runs.right.returncode == 0, runs.right.stderr
    head, *rows, last = runs.right.stdout.splitlines()
    assert head.split() == ["config", "error", "us", "TFLOPS"]
    assert [row.split()[0] for row in rows] == [PLAIN.name, SPLIT.name, STREAM.name]
    assert all(0 < float(row.split()[1]) < 0.01 and row.split()[2:] == ["-", "-"] for row in rows)
    assert last == "No GPU: verified by Triton's interpreter, not timed."
    _, *rows, last, status = runs.others.stdout.splitlines()[5:11]
    assert len(rows) == 3 and all("unknown" in row for row in rows)
    assert (last, status) == ("No GPU: nothing verified by Triton's interpreter, not timed.", "status 1")
    _, row, _, status = runs.others.stdout.splitlines()[-4:]
    assert row.startswith(PLAIN.name) and row.endswith("WRONG") and status == "status 1"
    # Importable where this package is not, right at other sizes, and plain about operands that are not its own.
    dtype, layout, shapes, bias, right = runs.others.stdout.splitlines()[:5]
    assert dtype == "a must be torch.float16, contiguous along dimension -1, not torch.float32 with strides (1, 1)"
    assert layout == "a must be torch.float16, contiguous along dimension -1, not torch.float16 with strides (1, 4)"
    assert shapes == "a must be [M, K] and b [K, N], not (1, 2) and (1, 1)"
    assert bias == "bias must be 1 of torch.float16, contiguous, not (2,) of torch.float16 with strides (1,)"
    assert right == "right"


@pytest.mark.heavy  # it times an import, again where the machine is busy
def test_thousands_of_configs_import_quickly(tmp_path: Path) -> None:
    many = list(itertools.islice(space(Problem(4096, 4096, 4096), GFX942), 5000))
    (tmp_path / "many.py").write_text(text_of(Problem(4096, 4096, 4096), many))
    timed = "import time, torch, triton; t = time.perf_counter(); import many; print(time.perf_counter() - t)"
    seconds = (float(forked.run(["-c", timed], tmp_path, environment()).stdout) for _ in range(4))
    assert any(second < 2 for second in seconds)


@apart(pytest.param(GFX942, id="gfx942", marks=pytest.mark.heavy), pytest.param(SM90, id="sm90"))
def test_every_config_has_its_own_kernel_name(target: target.Target, /, session_cache: Path) -> None:
    """A profiler's trace distinguish binaries: the symbol is the config's name, less what is a run-time argument."""
    problem = Problem(64, 64, 64)
    configs = [PLAIN, replace(PLAIN, num_warps=8), TMA_SWAPPED if target.has("tma") else GEMV]
    backend = registry.get(KernelBackend, "triton")
    compiler = BuildPool(ArtifactCache(session_cache), jobs=1)
    try:
        built = list(compiler.stream(backend.compile_job(c, problem, target) for c in configs))
    finally:
        compiler.close()
    assert [b.status for b in built] == ["ok"] * 3, [b.reason for b in built]
    for one in built:
        code = Path(one.path).read_bytes()
        assert code_object.arch(code) == target.name
        assert [k.symbol for k in code_object.read(code)] == [one.config.kernel_name] == [one.symbol]
    other = replace(PLAIN, group_m=4)
    jobs = [backend.compile_job(c, problem, target) for c in (PLAIN, other)]
    assert jobs[0].digest == jobs[1].digest
    launched = [backend.launch(replace(built[0], config=c), problem, target) for c in (PLAIN, other)]
    assert [launch.params[12].value for launch in launched] == [PLAIN.group_m, 4]


@each(("k", "scales", "there"), [(16384, "row", True), (8192, "row", False), (16384, "block", False)])
def test_long_sums_of_fp8_are_of_blocks(k: int, scales: str, there: bool) -> None:
    """Where Hopper's matrix units would keep too few bits; sums that are scaled along K are of blocks anyway."""
    family = registry.get(Family, "a8w8" if scales == "row" else "a8w8_blockscale")
    problem = family.problem(Problem(64, 256, k, *matrices("fp8e4m3fn", c="bf16", layout="TN")), scales)
    config = Config("tma", 64, 64, 128, 1, 1, 4, 3)
    assert ("max_num_imprecise_acc=BLOCK_K" in text_of(problem, [config], SM90)) == there
    assert "max_num_imprecise_acc" not in text_of(
        replace(problem, a=problem.a._replace(dtype="bf16"), b=problem.b._replace(dtype="bf16")), [config], SM90
    )
    assert "max_num_imprecise_acc" not in text_of(problem, [replace(config, template="tile")])
