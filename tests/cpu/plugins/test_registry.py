"""Plug-ins: one file dropped into a folder is found and used; one that can't run says why."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.timers import toy_timer
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core import search_results, target
from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.tuning_options import TuningOptions as Plan
from tritongemm.formats import Defaults
from tritongemm.plugins import _modules as registry
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Timer
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.search import planner
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files
from tritongemm.tuning.run import TuningRun
from tritongemm.workloads import sizes

Drop = Callable[[str, str, str], None]


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts a plug-in of some kind, name and text beside the ones that are there."""
    modules = set(sys.modules)

    def add(kind: str, name: str, text: str) -> None:
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        package = importlib.import_module(registry.KINDS[kind])
        if str(folder) not in package.__path__:
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        importlib.invalidate_caches()

    yield add
    for name in set(sys.modules) - modules:
        if name.rpartition(".")[2].startswith("toy"):
            del sys.modules[name]
            package, _, leaf = name.rpartition(".")
            vars(sys.modules[package]).pop(leaf, None)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_what_is_there(kind: str) -> None:
    """Every file is listed, sorted, and loads or says why it can't."""
    known = registry.names(kind)
    folder = Path(str(importlib.import_module(registry.KINDS[kind]).__file__)).parent
    assert known == sorted(p.stem for p in folder.iterdir() if not p.stem.startswith("_"))
    for name in known:
        reason = registry.unavailable(kind, name)
        assert reason is None or reason.strip()


@pytest.mark.parametrize("kind", registry.KINDS)
def test_names_nobody_has(kind: str) -> None:
    with pytest.raises(InputError, match=f"no {kind} plug-in is called 'abacus'; there are: "):
        registry.load(kind, "abacus")


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


def test_plug_ins_that_can_not_run_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_timer(tmp_path, monkeypatch):
        (tmp_path / "toy_missing.py").write_text("import a_package_nobody_has\n")
        (tmp_path / "toy_refuses.py").write_text(REFUSING_TIMER)
        (tmp_path / "toy_empty.py").write_text("")
        (tmp_path / "_toy_helper.py").write_text("raise RuntimeError('shared code is no plug-in')\n")
        assert {"toy_empty", "toy_missing", "toy_refuses"} <= set(plugins.names(Timer))
        assert "_toy_helper" not in plugins.names(Timer)
        assert plugins.available(Timer, "toy_refuses").reason == "no sun on this machine"
        why = plugins.available(Timer, "toy_missing").reason
        assert why.startswith("timer toy_missing needs a package that is missing") and "a_package_nobody" in why
        with pytest.raises(UnavailableError, match="a_package_nobody_has"):
            plugins.get(Timer, "toy_missing")
        with pytest.raises(InputError, match="must hold one class that derives from Timer; it holds none"):
            plugins.get(Timer, "toy_empty")
        with pytest.raises(InputError, match="no timer is called 'abacus'; there are: .*events"):
            plugins.get(Timer, "abacus")


FAMILY = """
def unsupported(problem, target):
    return 'toys are for children' if problem.m > 5 else None
def tolerance(problem):
    return 0.125
def scale(problem):
    return 0.5
"""

STRATEGY = """
def search(space, order, budget, seeds=(), expected=None, compiled=frozenset()):
    first = yield [order[-1]]
    assert first[0].config == order[-1]
    yield [order[0]]
"""

BACKEND = """
from tritongemm.core.artifact import CompileJob as Job
from tritongemm.core.artifact import Artifact as Built
def job(config, problem, target, module):
    return Job(config, {"toy": config.name})
def build(job):
    return Built(job.config, job.digest, symbol="toy", registers=7), b"code", "kernel.toy"
"""


def test_one_file_of_each_kind_goes_down_the_line(drop: Drop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy family, strategy, backend, timer and format together tune a toy file."""
    drop("families", "toy_family", FAMILY)
    drop("strategies", "toy_strategy", STRATEGY)
    drop("backends", "toybackend", BACKEND)
    drop(
        "formats",
        "toy_format",
        "from tritongemm.formats import FormatRow as Row\n"
        "FORMAT = 'toy'\n"
        "def recognises(path, text): return text.startswith('toy')\n"
        "def read(path, text, defaults):\n"
        "    return [Row(defaults.problem(*map(int, l.split()), family='toy_family')) for l in text.splitlines()[1:]]\n",
    )
    (tmp_path / "sizes.toy").write_text("toy\n3 4 5\n")
    (row,) = sizes.from_file(tmp_path / "sizes.toy", Defaults())
    assert row.problem == Problem(3, 4, 5, family="toy_family")
    assert registry.load("families", "toy_family").unsupported(Problem(6, 1, 1), None) == "toys are for children"

    configs = [Config("toy", n, n, n, backend="toybackend") for n in (1, 2, 3)]

    def planned(problem: Problem, target: target.Target, folder: Path) -> planner.SearchPlan:
        expected = search_results.Predictions(tuple(configs), np.ones(3), np.ones((3, len(search_results.TERMS))))
        kept = planner.prune.Pruned(tuple(configs), {}, {})
        return planner.SearchPlan(problem, space(problem, target), expected, kept, folder / "none.py")

    monkeypatch.setattr(planner, "plan_search", planned)
    monkeypatch.setattr("tritongemm.codegen.modules.write_winner", lambda *_: None)
    compiler = BuildPool(ArtifactCache(tmp_path / "cache"), jobs=1)
    monkeypatch.setattr(compiler, "build", lambda job: registry.load("backends", job.config.backend).build(job)[0])
    judge = FakeEvaluator(seconds=lambda config: 60.0 + len(judge.screened))
    store = Store.open(tmp_path / "out.yaml", "gfx942", {}, {})
    with store:
        plan = Plan(tmp_path, strategy="toy_strategy", library="")
        assert TuningRun([judge], compiler, store, plan, Reporter()).tune([row.problem]) == {}
        record = store.record(row.problem)
    assert judge.screened == [configs[-1], configs[0]], "what the toy strategy asked for, in its order"
    assert record and (record.timer, record.winner, record.config) == ("sundial", "toybackend", configs[-1])


def test_a_backends_job_is_built_by_its_file(drop: Drop, tmp_path: Path) -> None:
    """The compiler process finds the backend as this process does."""
    drop("backends", "toybackend", BACKEND)
    job: CompileJob = registry.load("backends", "toybackend").job(
        Config("toy", 1, 2, 3, backend="toybackend"), None, None, ""
    )
    built, code, name = registry.load("backends", job.config.backend).build(job)
    cache = ArtifactCache(tmp_path)
    cache.put(built, code, name)
    found = cache.get(job.digest)
    assert found and (found.registers, Path(found.path).read_bytes()) == (7, b"code")


def test_a_target_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text((target_files.SPACES / "base.yaml").read_text())
    (tmp_path / "gfx942.yaml").write_text((target_files.SPACES / "gfx942.yaml").read_text())
    (tmp_path / "toy1.yaml").write_text("inherit: gfx942\ntarget: {product: Toy, compute_units: 3}\n")
    monkeypatch.setattr(target_files, "SPACES", tmp_path)
    target_files.space_file.cache_clear()
    try:
        toy = target_files.load_target("toy1")
        assert (toy.name, toy.product, toy.compute_units, toy.wave_size) == ("toy1", "Toy", 3, 64)
        assert "toy1" in target_files.target_names() and len(space(Problem(16, 16, 16), toy)) > 0
    finally:
        target_files.space_file.cache_clear()


def test_a_plugin_in_use_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate asks for its backend: reading the folder each time cost more than all else before its compile."""
    backend = registry.load("backends", "triton")
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda _: pytest.fail("it reads the folder"))
    assert registry.load("backends", "triton") is backend
    monkeypatch.undo()
    importlib.import_module("tritongemm.numerics.random_inputs")
    with pytest.raises(InputError, match="no families plug-in is called '_common'"):
        registry.load("families", "_common")
