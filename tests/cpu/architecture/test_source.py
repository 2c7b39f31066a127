import ast
import builtins
import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.architecture.offenders import check
from tests.cpu.architecture.source_tree import FILES, HOME, PACKAGE, nodes, syntax, tracked_files
from tests.support import ROOT, forked
from tests.support.tables import each, heavy

LINKS = ("codegen", "hip_ext", "search_spaces", "codegen/templates")  # in the package, to folders of the repository
MAX_LINES = 400
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))
TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".j2", ".c", ".cpp", ".sh", "")  # suffixes of files that people read

# Modules that make temporary folders, each with the reason.
TEMPORARY = {"tritongemm.system.temporary_folder": "all others use it"}

# getattr and hasattr with a constant name that ask no plug-in, each with the reason.
_OLDER = "the attribute is there in some of the supported versions of Triton alone"
PROBES = {
    "backends.triton.compiling: getattr(kernel, 'is_gluon', bool)": _OLDER,
    "backends.triton.compiling: getattr(meta, 'global_scratch_size', 0)": _OLDER,
    "backends.triton.compiling: getattr(meta, 'tensordesc_meta', None)": _OLDER,
    "formats._yaml_values: getattr(error, 'problem', None)": "only some of PyYAML's errors say what is wrong",
    "formats._yaml_values: getattr(error, 'problem_mark', None)": "only some of PyYAML's errors know the line",
    "integrations.aiter_scaled: getattr(w, 'is_shuffled', False)": "AITER marks tensors so",
    "plugins.contracts.plugin: getattr(member, '__isabstractmethod__', False)": "abc marks abstract methods so",
    "plugins.registry: hasattr(module, '__path__')": "Python distinguishes a package from a module by it",
}


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short_and_names_of_classes_unique() -> None:
    every = {*FILES.values(), *tracked_files("tests", "benchmarks"), *(ROOT / "templates").rglob("*.j2")}
    long = [f"{_short(path)}" for path in every if len(path.read_text().splitlines()) > MAX_LINES]
    check("files are short", long, f"split them: more than {MAX_LINES} lines")
    homes: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module.removeprefix(f"{PACKAGE}."))
    assert len(homes) > 100
    shared = [f"{name}: {', '.join(sorted(modules))}" for name, modules in homes.items() if len(modules) > 1]
    hidden = [f"{name}: {', '.join(modules)}" for name, modules in homes.items() if hasattr(builtins, name)]
    check("class names are unique", [*shared, *hidden], "a name has one meaning (docs/reference/glossary.md)")


def test_the_environment_is_read_in_one_file() -> None:
    """The others may pass it on to a child as it is."""
    readers = {
        name
        for name, path in FILES.items()
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("getenv", "environb"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os.environ")
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ")
    }
    assert readers == {"tritongemm.system.settings"}


def test_temporary_folders_are_made_in_one_file() -> None:
    """One that is made elsewhere is not locked, so that it is not swept when its process is killed."""
    makers = {
        name
        for name, path in FILES.items()
        for node in nodes(path)
        if isinstance(node, (ast.Attribute, ast.Name, ast.alias))
        and ast.unparse(node).rpartition(".")[2] in ("TemporaryDirectory", "mkdtemp")
    }
    check("temporary folders are made in one file", makers, "use TemporaryFolder", TEMPORARY)


def _outside_modules(tree: ast.Module) -> set[str]:
    """Names under which a file imports packages that are not the project's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names if not a.name.startswith(PACKAGE)}
    return found


def _probes(path: Path) -> Iterator[str]:
    """Calls of getattr and hasattr with a constant name, but on a package from outside the project."""
    outside = _outside_modules(syntax(path))
    for node in nodes(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in ("getattr", "hasattr") or not isinstance(node.args[1], ast.Constant):
            continue
        if ast.unparse(node.args[0]).split(".")[0] not in outside:
            yield ast.unparse(node)


def test_no_object_is_probed() -> None:
    """A contract says what an object has."""
    offenders = {
        f"{module.removeprefix(f'{PACKAGE}.')}: {probe}"
        for module, path in FILES.items()
        if not module.startswith(f"{PACKAGE}.hip_ext")
        for probe in _probes(path)
    }
    check("no object is probed", offenders, "give it a typed attribute (docs/plugins)", PROBES)


@each("name", LINKS)
def test_a_folder_of_the_repository_is_linked_into_the_package(name: str) -> None:
    link = HOME / name
    assert link.is_symlink() and link.resolve() == ROOT / link.name
    assert importlib.import_module(f"{PACKAGE}.{name.replace('/', '.')}").__file__ is not None


def _is_text_in_the_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the user's encoding, which may lack most letters."""
    given = {word.arg: word.value for word in call.keywords}
    if "encoding" in given:
        return False
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if last in ("read_text", "write_text"):
        return "." in name
    if last in ("run", "Popen", "check_output"):
        return "text" in given or "universal_newlines" in given
    if name not in ("open", "io.open", "os.fdopen") and (last != "open" or (call.args and not modes)):
        return False  # no file, or opened by a number alone
    return not any("b" in mode for mode in modes)


def test_text_is_utf8_wherever_it_runs() -> None:
    offenders = {
        f"{module.removeprefix(f'{PACKAGE}.')}: {ast.unparse(node)}"
        for module, path in FILES.items()
        for node in nodes(path)
        if isinstance(node, ast.Call) and _is_text_in_the_locale(node)
    }
    check("text is UTF-8 wherever it runs", offenders, 'say encoding="utf-8"')


def _climbs(node: ast.Attribute) -> bool:
    """Whether it goes more than one folder up from a file of the project, or up from the repository."""
    if node.attr not in ("parent", "parents"):
        return False
    owner = ast.unparse(node.value)
    own_file = re.search(r"(?<![\w.])(tritongemm\.)?__file__", owner)
    if node.attr == "parents":
        return bool(own_file) or owner in ("ROOT", "DATA", "FAKES")
    return owner in ("ROOT", "DATA", "FAKES") or bool(own_file and ".parent" in owner)


def test_no_test_climbs_out_of_the_repository() -> None:
    """The path of the repository is written once, in tests/support; its data are in it."""
    climbs = set()
    for path in {*tracked_files("tests")} - {ROOT / "tests" / "support" / "__init__.py"}:
        for node in nodes(path) if ".parent" in path.read_text() else ():  # to parse them all takes seconds
            if isinstance(node, ast.Attribute) and _climbs(node):
                climbs.add(f"{_short(path)}: {ast.unparse(node)}")
    check("no test climbs out of the repository", climbs, "use ROOT and DATA of tests.support")


def test_no_file_names_a_machine() -> None:
    machine = re.compile(r"(?<![\w.])/(work|root|mnt|Users/\w+|home/(?!someone)\w+)/\w+|\b\w+\.internal\b")
    offenders = set()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / line for line in listed.stdout.splitlines()] or tracked_files("tests", "benchmarks", "tritongemm")
    for path in (p for p in paths if p.suffix in TEXTS and p.is_file()):
        offenders |= {f"{_short(path)}: {found[0]}" for found in machine.finditer(path.read_text())}
    check("no file names a machine", offenders, "say it so that it holds anywhere")


# Asks scripts for help, each in a process of its own that has imported nothing but what takes longest.
ASK_FOR_HELP = """
import os, runpy, sys, torch, triton
for place, script in enumerate(sys.argv[1:]):
    if not os.fork():
        os.dup2(os.open(f"{place}.out", os.O_CREAT | os.O_WRONLY), 1)
        sys.argv[:], sys.path[0] = [script, "--help"], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        sys.exit("it goes on after --help")
    if os.wait()[1]:
        sys.exit(f"{script} fails")
"""


@pytest.mark.parametrize("scripts", [BENCHMARKS[:2], heavy(BENCHMARKS[2:])], ids=len)
def test_benchmarks_run_from_a_checkout(scripts: list[Path], tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = forked.run(["-c", ASK_FOR_HELP, *map(str, scripts)], tmp_path, environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for place, script in enumerate(scripts):
        assert "usage:" in (tmp_path / f"{place}.out").read_text(), script
