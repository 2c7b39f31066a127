import argparse
import ast
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import ROOT
from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Config, Defaults, Patch, Target, cases, each, fails, refuses, registry, sizes, space
from tests.support.nouns import loader as target_files
from tests.support.plugins import dropped, forget_plugins
from tests.support.racing import pool_and_store
from tritongemm.cli import options
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.plugins.contracts import (
    Backend,
    Family,
    Format,
    KernelBackend,
    KernelSource,
    LibraryBackend,
    Plugin,
    ScaleLayout,
    SearchedBackend,
    Strategy,
    Timer,
    WeightLayout,
    searching,
)
from tritongemm.report.console import Reporter
from tritongemm.search import planner
from tritongemm.tune import search_processes
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun

KINDS: tuple[type[Plugin], ...] = (
    Backend, Family, Format, KernelSource, ScaleLayout, Strategy, Timer, WeightLayout,
)  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: kind.kind)
def kind(request: pytest.FixtureRequest) -> type[Plugin]:
    found: type[Plugin] = request.param
    return found


def test_names_and_aliases_are_listed_and_unknown_ones_refused(kind: type[Plugin]) -> None:
    known = registry.names(kind)
    folder = Path(str(importlib.import_module(kind.package).__file__)).parent
    assert known == sorted(p.stem for p in folder.iterdir() if not p.stem.startswith("_"))
    loaded = registry.every(kind)
    assert [plugin.name for plugin in loaded] == [n for n in known if n in {p.name for p in loaded}]
    for plugin in loaded:
        assert isinstance(plugin, kind) and registry.get(kind, plugin.name) is plugin
    for name in known:
        support = registry.available(kind, name)
        assert bool(support) != bool(support.reason.strip())
    for ask in (registry.get, registry.available, registry.resolve):
        refuses(f"no {kind.kind} is called 'abacus'; there are: ", ask, kind, "abacus")
    # As linear_w4 gets a bias in the place of its order.
    refuses(f"a {kind.kind} is named by a text, not a Tensor; there are: ", registry.get, kind, torch.zeros(2))
    names = registry.names(kind)
    aliases = [(alias, plugin.name) for plugin in registry.every(kind) for alias in plugin.aliases]
    assert all(registry.resolve(kind, name) == name for name in names)
    assert all(registry.resolve(kind, alias) == name for alias, name in aliases)
    assert len({alias for alias, _ in aliases} | set(names)) == len(aliases) + len(names), "each means one thing"


def test_a_kind_within_a_kind() -> None:
    """Asking for a backend with a search space by the name of another is an error; the baseline is the one library."""
    triton = registry.get(SearchedBackend, "triton")
    assert triton is registry.get(Backend, "triton") is registry.get(KernelBackend, "triton")
    assert len([backend for backend in registry.every(Backend) if isinstance(backend, SearchedBackend)]) == 1
    refuses("backend torch is ", registry.get, KernelBackend, "torch")
    baseline = registry.baseline()
    assert isinstance(baseline, LibraryBackend) and baseline.baseline
    assert sum(backend.baseline for backend in registry.every(Backend)) == 1


def test_families_and_their_variants() -> None:
    family, defaults = registry.family_of("dense")
    assert (family.name, defaults.b.order) == ("dense", PLAIN)
    for name in ("dense_bpreshuffle", "a8w8_bpreshuffle", "a4w4_bpreshuffle", "a8w8_blockscale_bpreshuffle"):
        family, defaults = registry.family_of(name)
        assert name in family.variants and defaults.b.order == "shuffled_16x16"
    refuses(r"no family is called 'a9w9'; there are: .*dense.*a8w8_bpreshuffle", registry.family_of, "a9w9")


REFUSING_TIMER = """
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import Timer

class Sundial(Timer):
    label = "sundial"
    def available(self):
        return Support("no sun on this machine")
    def clock(self, device, stream):
        raise NotImplementedError
"""


def test_plug_ins_that_can_not_run_say_why(tmp_path: Path, monkeypatch: Patch) -> None:
    with dropped(Timer, "timer_toy", tmp_path, monkeypatch):
        (tmp_path / "Timer" / "toy_missing.py").write_text("import a_package_that_is_missing\n")
        (tmp_path / "Timer" / "toy_ends.py").write_text("raise SystemExit('no such device')\n")
        (tmp_path / "Timer" / "toy_refuses.py").write_text(REFUSING_TIMER)
        (tmp_path / "Timer" / "toy_empty.py").write_text("")
        (tmp_path / "Timer" / "_toy_helper.py").write_text("raise RuntimeError('shared code is no plug-in')\n")
        forget_plugins(tmp_path / "Timer")
        assert {"toy_empty", "toy_missing", "toy_refuses"} <= set(registry.names(Timer))
        assert "_toy_helper" not in registry.names(Timer)
        assert registry.available(Timer, "toy_refuses").reason == "no sun on this machine"
        why = registry.available(Timer, "toy_missing").reason
        assert why.startswith("timer toy_missing needs a package that is missing") and "a_package_that" in why
        fails(UnavailableError, "a_package_that_is_missing", registry.get, Timer, "toy_missing")
        fails(UnavailableError, "ends the program .no such device", registry.get, Timer, "toy_ends")
        refuses(r"^\S+ must hold one class that derives from Timer; it holds none", registry.get, Timer, "toy_empty")
        (tmp_path / "Timer" / "toy_empty.py").unlink()
        forget_plugins(tmp_path / "Timer")
        assert "toy_missing" not in {timer.name for timer in registry.every(Timer)}, "what can't be imported"


def test_a_file_holds_one_plug_in(tmp_path: Path, monkeypatch: Patch) -> None:
    text = "from tritongemm.plugins.contracts import Strategy\n"
    # As a name of list[int] is in Python 3.10: what says that it is a class.
    text += "class Named:\n    __class__ = type\n\nROWS = Named()\n"
    text += "".join(f"class S{i}(Strategy):\n    def search(self, plan, budget):\n        yield []\n" for i in (1, 2))
    (tmp_path / "toy_twice.py").write_text(text)
    with (
        dropped(Strategy, tmp_path / "toy_twice.py", tmp_path, monkeypatch),
        pytest.raises(InputError, match="must hold one class that derives from Strategy; it holds S1, S2"),
    ):
        registry.get(Strategy, "toy_twice")


LACKING = {
    Family: "_supports, .*summary, tolerance", KernelSource: ".*resolve", ScaleLayout: "pack, unpack",
    KernelBackend: "_candidates, _check, _compile, _compile_job, _launch, capabilities, sum",
    LibraryBackend: "_list_algorithms, .*operation", Strategy: "search", Timer: "clock, label",
    WeightLayout: "pack, supports, unpack",
}  # fmt: skip


@each("kind", LACKING)
def test_a_class_without_what_its_kind_must_have_can_not_be_defined(kind: type[Plugin]) -> None:
    fails(TypeError, f"Half is no {kind.kind} plug-in yet: it lacks {LACKING[kind]}", type, "Half", (kind,), {})


def test_an_incomplete_plug_in_fails_when_it_is_defined(tmp_path: Path, monkeypatch: Patch) -> None:
    """What is inherited counts."""

    class Shared(Timer, abstract=True):
        label = "shared"

    with pytest.raises(TypeError, match=r"Rest is no timer plug-in yet: it lacks clock \(docs/plugins\)"):

        class Rest(Shared):
            """Has a label from its base."""

    (tmp_path / "toy_half.py").write_text(
        "from tritongemm.plugins.contracts import Family\nclass Half(Family):\n    summary = 'of one'\n"
    )
    with dropped(Family, tmp_path / "toy_half.py", tmp_path, monkeypatch):
        lacks = r"toy_half.Half is no family plug-in yet: it lacks _supports, .*tolerance"
        refuses(lacks, registry.get, Family, "toy_half")
        fails(argparse.ArgumentTypeError, rf"{lacks}.*line \d+\)$", options.family, "toy_half")


@cases(
    ("raise ValueError('a typo')", r"ValueError: a typo \(.*toy_typo.py, line 2\)"),
    ("import", r"SyntaxError: [^(]*\(toy_typo.py, line 2\)"),
    ("class Half(Backend):\n    summary = 'x'\n", "TypeError: .*Half is no backend plug-in yet: it lacks .*line 2\\)"),
)
def test_a_broken_file_costs_itself_alone(text: str, fault: str, /, tmp_path: Path, monkeypatch: Patch) -> None:
    """The others are there, with a warning that names it; who asks for it by name gets the error."""
    (tmp_path / "toy_typo.py").write_text(f"from tritongemm.plugins.contracts import Backend\n{text}\n")
    entire = [backend.name for backend in registry.every(Backend)]
    with dropped(Backend, tmp_path / "toy_typo.py", tmp_path, monkeypatch):
        with pytest.warns(UserWarning, match=f"backend toy_typo raises {fault}; it is passed over"):
            assert [backend.name for backend in registry.every(Backend)] == entire
        refuses(f"backend toy_typo raises {fault}", registry.get, Backend, "toy_typo")


STRATEGY = """
from tritongemm.plugins.contracts import Strategy

class LastThenFirst(Strategy):
    def search(self, plan, budget):
        order = plan.expected.configs
        first = yield [order[-1]]
        assert first[0].config == order[-1]
        yield [order[0]]
"""


def test_a_format_and_a_strategy_are_used_by_their_names(tmp_path: Path, monkeypatch: Patch) -> None:
    """What the strategy asks for is screened, in its order; backends and families are in tests/cpu/scenarios."""
    (tmp_path / "sizes.csv").write_text("toy,M,N,K\na,3,4,5\n")
    (tmp_path / "toy_strategy.py").write_text(STRATEGY)
    with dropped(Format, "format_toy", tmp_path, monkeypatch):
        (row,) = sizes.from_file(tmp_path / "sizes.csv", Defaults())
    with dropped(Strategy, tmp_path / "toy_strategy.py", tmp_path, monkeypatch):
        configs = [Config("tile", n, n, n) for n in (16, 32, 64)]

        def planned(problem: Problem, target: Target, *_: object) -> planner.PlannedProblem:
            expected = searching.Predictions(tuple(configs), np.ones(3), np.ones((3, len(searching.TERMS))))
            kept = searching.Pruned(tuple(configs), {}, {})
            return planner.PlannedProblem(problem, space(problem, target), expected, kept)

        monkeypatch.setattr(search_processes, "plan_search", planned)
        monkeypatch.setattr("tritongemm.codegen.modules.write_winner", lambda *_: None)
        evaluator = FakeEvaluator(seconds=lambda config: 60.0 + len(evaluator.screened))
        with pool_and_store(tmp_path) as (pool, store):
            options = TuningOptions(tmp_path, strategy="toy_strategy", library="")
            assert TuningRun([evaluator], pool, store, options, Reporter()).tune([row.problem]) == {}
    assert (row.problem.m, row.problem.n, row.problem.k) == (3, 4, 5)
    assert evaluator.screened == [configs[-1], configs[0]]


def test_a_target_is_one_file(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "base.yaml").write_text((target_files.SPACES / "base.yaml").read_text())
    (tmp_path / "gfx942.yaml").write_text((target_files.SPACES / "gfx942.yaml").read_text())
    (tmp_path / "toy1.yaml").write_text("inherit: gfx942\ntarget: {product: Toy, compute_units: 3}\n")
    monkeypatch.setattr(target_files, "SPACES", tmp_path)
    target_files.space_file.cache_clear()
    try:
        example = target_files.load_target("toy1")
        assert (example.name, example.product, example.compute_units, example.wave_size) == ("toy1", "Toy", 3, 64)
        assert "toy1" in target_files.target_names() and len(space(Problem(16, 16, 16), example)) > 0
    finally:
        target_files.space_file.cache_clear()


def test_a_plugin_in_use_is_not_looked_for_again(monkeypatch: Patch) -> None:
    """Every candidate asks for its backend: reading the folder each time cost more than all else before its compile."""
    backend = registry.get(Backend, "triton")
    monkeypatch.setattr("pkgutil.iter_modules", lambda _: pytest.fail("it reads the folder"))
    assert registry.get(Backend, "triton") is backend
    monkeypatch.undo()
    importlib.import_module("tritongemm.numerics.families._standard")
    refuses("no family is called '_standard'", registry.get, Family, "_standard")


SLOW = """
import time
from tritongemm.plugins.contracts import Strategy

class Slow(Strategy):
    def __init__(self):
        time.sleep(0.05)
    def search(self, plan, budget):
        yield []
"""


def test_threads_that_ask_at_once_get_one_object(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "toy_slow.py").write_text(SLOW)
    with dropped(Strategy, tmp_path / "toy_slow.py", tmp_path, monkeypatch), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: registry.get(Strategy, "toy_slow"), range(4)))
    assert len({id(one) for one in found}) == 1


def test_no_module_asks_for_a_plug_in_while_it_is_imported() -> None:
    """Else a thread that imports it and one that loads a plug-in could wait for each other."""

    def called(tree: ast.AST) -> Iterator[str]:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("registry."):
                yield ast.unparse(node)
            yield from called(node)

    folders = [ROOT / name for name in ("tritongemm", "codegen", "hip_ext", "search_spaces")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 150
    texts = {str(file): text for file in files if "registry." in (text := file.read_text())}
    assert {name: calls for name, text in texts.items() if (calls := list(called(ast.parse(text))))} == {}
