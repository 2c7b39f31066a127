"""Imports go down the table of docs/architecture.md: deferred ones, types and roles of children too."""

import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.cpu.architecture.offenders import check
from tests.cpu.architecture.source_tree import FILES, HOME, PACKAGE, imports, place
from tests.support import ROOT, forked
from tests.support.tables import cases
from tritongemm.cli.arguments import COMMANDS

LEVELS = {
    "core": 0,
    "system": 1,
    "search_spaces": 1,
    "plugins": 1,
    "hip_ext": 2,
    "numerics": 2,
    "codegen": 3,
    "search": 4,
    "build": 4,
    "formats": 4,
    "operations": 4,
    "backends": 5,
    "measure": 5,
    "workloads": 5,
    "results": 5,
    "export": 5,
    "tune": 6,
    "serving": 6,
    "report": 6,
    "campaigns": 7,
    "integrations": 7,
    "cli": 8,
}

ALLOWED = {
    "core": set(),
    "system": {"core"},
    "search_spaces": {"core"},
    "plugins": {"core"},
    "hip_ext": {"core", "system", "search_spaces"},
    "numerics": {"core", "plugins"},
    "codegen": {"core", "system", "plugins", "numerics"},
    "search": {"core", "plugins", "codegen", "search_spaces"},
    "build": {"core", "system", "plugins", "numerics"},
    "formats": {"core", "system", "plugins", "search_spaces"},
    "operations": {"core", "plugins", "numerics"},
    "backends": {*("core", "system", "plugins", "hip_ext", "codegen", "search", "search_spaces", "operations")},
    "measure": {"core", "system", "plugins", "hip_ext", "numerics", "codegen", "search"},
    "workloads": {"core", "system", "plugins", "formats", "operations"},
    "results": {"core", "system", "plugins", "formats"},
    "export": {*("core", "system", "plugins", "hip_ext", "codegen", "search_spaces", "build"), "operations"},
    "tune": {
        *("core", "system", "plugins", "hip_ext", "numerics", "codegen", "search", "build", "measure", "results"),
        *("workloads", "search_spaces"),
    },
    "serving": {
        *("core", "system", "plugins", "hip_ext", "numerics", "search_spaces", "build", "formats"),
        *("workloads", "export", "operations"),
    },
    "report": {"core", "system", "plugins", "results"},
    "campaigns": {
        *("core", "system", "plugins", "hip_ext", "search", "search_spaces", "build", "results", "workloads"),
        *("formats", "export", "tune"),
    },
    "integrations": {"core", "system", "operations", "serving"},
    "cli": set(LEVELS) - {"cli", "integrations"},
}

PACKAGE_ITSELF = {
    "core",
    "operations",
    "system",
    "workloads",
    "serving",
    "tune",
    "cli",
}  # what `import tritongemm` reaches
# The most arrows (pairs of modules of a package of which one imports the other) and floors (modules of its longest
# chain of imports): with more of them a picture of the package explains nothing.
MOST_ARROWS, MOST_FLOORS = 80, 10
MORE = {"serving": (110, 12)}

HEAVY = ("jinja2", "joblib", "rich", "triton", "yaml")  # what serving a call does without


def test_the_table_goes_down_and_has_every_package() -> None:
    assert LEVELS.keys() == ALLOWED.keys() and len(set(LEVELS.values())) <= 9
    assert not {(a, b) for a, others in ALLOWED.items() for b in others if LEVELS[a] <= LEVELS[b]}
    packages = {place(name) for name, path in FILES.items() if path.parent != HOME}
    assert packages == LEVELS.keys(), "docs/architecture.md has the table of packages"


def test_the_first_level_is_short() -> None:
    """What a plain `ls` lists; the entry point of `python -m tritongemm.tune` is in the package that tunes."""
    names = {at.name for at in HOME.iterdir() if at.is_file() or {p.name for p in at.iterdir()} - {"__pycache__"}}
    names -= {"__pycache__"}
    assert len(names) <= 24, sorted(names)


def test_imports_go_down() -> None:
    offenders = []
    for module in FILES:
        own = place(module) if place(module) in LEVELS else "cli"  # commands
        allowed = PACKAGE_ITSELF if module == PACKAGE else {*ALLOWED[own], own}
        offenders += [str(line) for line in imports(module) if place(line.imported) not in {*allowed, PACKAGE}]
    check("imports go down", offenders, "the table in docs/architecture.md does not allow these imports")


@cases(
    # What serves imports libraries, and nothing else of what a person takes away.
    ("export.library", {*ALLOWED["export"]} - {"codegen"}, "serving"),
    # A program that is captured, and any that imports tritongemm, loads nothing else of what there is to tune.
    ("workloads.capturing", {"core", "system", "operations"}, PACKAGE),
)
def test_libraries_and_captures_stand_on_little(folder: str, below: set[str], importer: str, /) -> None:
    home, lines = f"{PACKAGE}.{folder}", [line for module in FILES for line in imports(module)]
    own = [line for line in lines if line.importer.startswith(home) and not line.imported.startswith(home)]
    assert own and not [str(line) for line in own if place(line.imported) not in {*below, PACKAGE}]
    top = folder.partition(".")[0]
    users = [line for line in lines if place(line.importer) == importer and place(line.imported) == top]
    assert users and not [str(line) for line in users if not line.imported.startswith(home)]


def test_a_package_can_be_drawn() -> None:
    """A package has few arrows and floors; deferred imports and those for types count too."""
    offenders = []
    for package in LEVELS:
        below = {
            module: {line.imported for line in imports(module) if place(line.imported) == package}
            for module in FILES
            if place(module) == package
        }
        floors: dict[str, int] = {}
        for module in TopologicalSorter(below).static_order():
            floors[module] = 1 + max((floors[other] for other in below[module]), default=0)
        arrows, floor = sum(map(len, below.values())), max(floors.values())
        most_arrows, most_floors = MORE.get(package, (MOST_ARROWS, MOST_FLOORS))
        if arrows > most_arrows or floor > most_floors:
            offenders.append(f"{package}: {arrows} arrows (at most {most_arrows}), {floor} floors ({most_floors})")
    check("a package can be drawn", offenders, "merge modules that always change together, or cut an import")


def test_what_is_of_the_system_knows_no_noun() -> None:
    of_the_system = {line.imported for module in FILES if place(module) == "system" for line in imports(module)}
    assert {name for name in of_the_system if place(name) != "system"} == {f"{PACKAGE}.core.errors"}


def test_imports_have_no_cycles() -> None:
    graph = {module: {line.imported for line in imports(module)} for module in FILES}
    assert len(graph) > 100 and "tritongemm.core.config" in graph["tritongemm.core.trial"]
    cycles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:  # found one at a time: cut it to find the next
            first, second = error.args[1][1], error.args[1][0]
            cycles.append(" -> ".join(_from_the_least(error.args[1][:-1][::-1])))
            graph[first].discard(second)
    check("no import cycles", cycles, "see docs/architecture.md; each line is a cycle of imports")


def _from_the_least(cycle: list[str]) -> list[str]:
    start = cycle.index(min(cycle))
    turned = cycle[start:] + cycle[:start]
    return [*turned, turned[0]]


def test_serving_imports_nothing_heavy() -> None:
    """Importing all that serves a call, and PyTorch, brings none of what only tuning needs."""
    beside = f"{PACKAGE}.workloads.capturing", f"{PACKAGE}.integrations.aiter"
    modules = sorted(n for n in FILES if place(n) in ("serving", "operations") or n.startswith(beside))
    code = f"import sys, {', '.join(modules)}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = forked.run(["-c", code], ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_planning_and_launching_load_no_triton() -> None:
    code = f"import sys, {PACKAGE}.backends.triton.backend, {PACKAGE}.tune.run; assert 'triton' not in sys.modules"
    done = forked.run(["-c", code], ROOT)
    assert not done.returncode, done.stderr


# Starts each subcommand as `python -m` does, in a process of its own that has imported what most import, not PyTorch.
OPEN = f"""
import os, runpy, sys
import numpy, {PACKAGE}.cli.search_options, {PACKAGE}.tune.session
for name in sys.argv[1:]:
    if not os.fork():
        os.dup2(os.open(f"{{name}}.out", os.O_CREAT | os.O_WRONLY), 1)
        sys.argv[:] = ["tritongemm", name, "--help"]
        try:
            runpy.run_module("{PACKAGE}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if not end.code and "torch" in sys.modules:
                os.rename(f"{{name}}.out", f"{{name}}.slow")
            raise
        sys.exit("it goes on after --help")
    if os.wait()[1]:
        print(name)
"""


def test_every_subcommand_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-c", OPEN, *COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    shut = {*done.stdout.split(), *(name for name in COMMANDS if "usage:" not in said.get(name, ""))}
    slow = {path.stem for path in tmp_path.glob("*.slow")}
    assert shut == set()
    assert slow == set(), "these import PyTorch, which takes a second, to answer --help"
    assert not [line for text in said.values() for line in text.splitlines() if len(line) > 80]
