"""The package as source text: its modules, what each imports, its classes and its plug-ins' names."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tritongemm
from tests.support import ROOT
from tritongemm.codegen.template_facts import TEMPLATES
from tritongemm.plugins import contracts

PACKAGE = "tritongemm"
HOME = Path(tritongemm.__file__).parent
_ROLE = re.compile(rf"{PACKAGE}(\.\w+)+:\w+")  # what a child process is asked to run


def _files() -> Iterator[tuple[str, Path]]:
    folders = [HOME, *sorted(d for d in HOME.iterdir() if d.is_dir())]
    for folder in folders:  # rglob would pass over the four folders that are links
        for path in sorted(folder.glob("*.py") if folder == HOME else folder.rglob("*.py")):
            parts = path.relative_to(HOME).with_suffix("").parts
            yield ".".join((PACKAGE, *parts)).removesuffix(".__init__"), path


FILES = dict(_files())  # where a package and a module have the same name, the package: Python imports that one too


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(syntax(path)))


def place(module: str) -> str:
    """The package at the first level that a module is in: ``serving`` of ``tritongemm.serving.api``."""
    parts = module.split(".")
    if len(parts) > 1 and parts[-1] == "__main__":
        return "cli"
    return parts[1] if len(parts) > 1 else PACKAGE


@dataclass(frozen=True)
class Import:
    """One module of the package that another one names in a line."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def _resolved(name: str) -> str | None:
    """The module that a dotted name is in; None for one outside the package."""
    while name.startswith(PACKAGE):
        if name in FILES:
            return name
        name = name.rpartition(".")[0]
    return None


def _absolute(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


@cache
def imports(importer: str) -> tuple[Import, ...]:
    """All modules of the package that one imports: deferred, for types alone, or as ``"module:Class"`` in a text."""
    found: dict[str, Import] = {}
    path = FILES[importer]
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = _absolute(node, importer, path.name == "__init__.py")
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]] if _ROLE.fullmatch(node.value) else []
        for name in names:
            module = _resolved(name)
            if module and module != importer:
                found.setdefault(module, Import(importer, module, getattr(node, "lineno", 0)))
    return tuple(found.values())


CONTRACTS: list[type[contracts.Plugin]] = [
    # A name of list[int] says that it is a class until Python 3.11, and is none.
    kind
    for kind in vars(contracts).values()
    if issubclass(type(kind), type) and issubclass(kind, contracts.Plugin)
]
PLUGIN_PACKAGES = {kind.package for kind in CONTRACTS if kind.package}


def plugin_folders() -> dict[str, set[Path]]:
    """Name of each plug-in: the files or folders that are its own."""
    found: dict[str, set[Path]] = {}
    for package in sorted(PLUGIN_PACKAGES & FILES.keys()):
        for child in FILES[package].parent.iterdir():
            is_plugin = child.suffix == ".py" or (child / "backend.py").exists()
            if is_plugin and not child.name.startswith("_"):
                found.setdefault(child.stem, set()).add(child)
    return found


def template_names() -> set[str]:
    return {path.stem for path in (TEMPLATES / "kernels").glob("*.j2") if not path.stem.startswith("_")}


def tracked_files(*folders: str) -> list[Path]:
    """Python files of the repository's folders beside the package."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
