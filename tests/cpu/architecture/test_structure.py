"""How the package is built: imports go downwards, files stay short, and the environment is read in one place."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tritongemm
from tests.support import ROOT

HOME = Path(tritongemm.__file__).parent
FILES = {
    ".".join(("tritongemm", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in [*HOME.glob("*.py"), *(p for d in HOME.iterdir() if d.is_dir() for p in d.glob("*.py"))]
}

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file, but for types alone or by a plug-in's name."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typed = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    passed_over = {id(n) for block in typed for n in ast.walk(block)}
    for node in (n for n in ast.walk(tree) if id(n) not in passed_over):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tritongemm"):
            below = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= below or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & FILES.keys()
    return found


def test_imports_have_no_circles() -> None:
    graph = {name: imported(path) & FILES.keys() - {name} for name, path in FILES.items()}
    assert len(graph) > 100 and "tritongemm.core.config" in graph["tritongemm.core.trial"]
    TopologicalSorter(graph).prepare()  # names the circle


def test_files_are_short() -> None:
    long = {name: lines for name, path in FILES.items() if (lines := len(path.read_text().splitlines())) > 400}
    assert not long


def test_the_environment_is_read_in_one_file() -> None:
    """The others may hand it on to a child as a whole."""
    readers = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("getenv", "environb"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os.environ")
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ")
    }
    assert readers == {"tritongemm.core.settings"}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.stem)
def test_benchmarks_run_from_a_checkout(path: Path, tmp_path: Path) -> None:
    """From any folder, without an install."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(path), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
