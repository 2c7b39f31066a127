import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tritongemm
from tests.cpu.architecture import doc_pages, source_tree
from tests.cpu.architecture.doc_pages import DOCS, PAGES, dashed
from tests.cpu.architecture.test_layers import ALLOWED, LEVELS
from tests.support import ROOT
from tritongemm.cli import subcommands
from tritongemm.codegen.fact_sections import OrderFacts, SearchFacts
from tritongemm.codegen.template_facts import KernelTemplate
from tritongemm.core.problem import JSON_KEYS
from tritongemm.core.record import Record
from tritongemm.core.trial import STATUSES, Trial
from tritongemm.operations.contract import Operation, ProductOperation
from tritongemm.plugins import contracts
from tritongemm.tune.task import NEXT_STATES

CONFIG = ROOT / "mkdocs.yml"
SETTINGS = ROOT / "tritongemm/system/settings.py"
README_LINES = 65
PROSE_LINES = 10  # of a page of measurements
FOREIGN = {"--no-deps", "-c"}  # options of pip and Python that pages name


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _nav(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from _nav(below) if isinstance(below, list) else [below]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for line, target in doc_pages.links(page.read_text()):
            if target.startswith(("https://", "http://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.is_file() or (anchor and anchor not in doc_pages.anchors(file.read_text())):
                broken.append(f"{_id(page)}:{line}: {target}")
    assert not broken, "there is no such file or heading: " + "; ".join(broken)


def test_what_a_page_names_is_there() -> None:
    absent, variables, known = list[doc_pages.Mention](), _variables(), _all_options() | FOREIGN
    for page in PAGES:
        name, text = _id(page), page.read_text()
        absent += [m for m in doc_pages.mentioned_paths(name, text) if not doc_pages.path_exists(m.text)]
        absent += [m for m in doc_pages.mentioned_modules(name, text) if not doc_pages.member_exists(m.text)]
        absent += [m for m in doc_pages.mentioned_variables(name, text) if m.text not in variables]
        absent += [m for m in doc_pages.mentioned_options(name, text) if not _is_option(m.text, known)]
        absent += [doc_pages.Mention(name, n, p) for n, p in doc_pages.snippets(text) if not (ROOT / p).is_file()]
    assert not absent, "these are named and not there: " + "; ".join(map(str, absent))


def _all_options() -> set[str]:
    files = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "scripts/tables/__main__.py", ROOT / "templates/module.py.j2"]
    return _command_options().union(*(doc_pages.parser_options(file) for file in files))


@cache
def _command_options() -> set[str]:
    parsers, found = [subcommands.full_parser()], set[str]()
    while parsers:
        parser = parsers.pop()
        found |= {dashed(option) for option in parser._option_string_actions}
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [one for action in below for one in action.choices.values()]
    return found


def _is_option(text: str, known: set[str]) -> bool:
    return dashed(text) in {dashed(option) for option in known}


def _variables() -> set[str]:
    tree = ast.parse(SETTINGS.read_text())
    names = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {n for n in names if re.fullmatch(r"[A-Z][A-Z_]+", n)}


def test_every_option_variable_and_key_is_reported() -> None:
    text = (DOCS / "reference/commands.md").read_text()
    reported = {dashed(m.text) for m in doc_pages.mentioned_options("commands", text)}
    second_names = {f"--{name}" for name in ("col-a", "col-b", "row-b", "dtype-a", "dtype-b", "dtype-c", *"omnk")}
    assert _command_options() - reported - second_names == {"-h"}
    variables = {m.text for m in doc_pages.mentioned_variables("commands", text)} | {"XDG_CACHE_HOME"}
    assert _variables() <= variables
    text = (DOCS / "reference/results.md").read_text()
    reported = {name for _, line in doc_pages.code(text) for name in re.findall(r"[\w()]+", line)}
    kept = {f.name for f in fields(Record)}
    kept |= {f.name for f in fields(Trial)} - {"try_again"}  # what may be tried again is not kept
    keys = kept | set(JSON_KEYS) | set(STATUSES)
    assert keys <= reported, sorted(keys - reported)


def _contracts() -> list[type[contracts.Plugin]]:
    return [*source_tree.CONTRACTS, Operation, ProductOperation]


def test_every_name_of_the_api_has_its_docstring_on_the_page() -> None:
    text = (DOCS / "reference/api.md").read_text()
    assert sorted(re.findall(r"(?m)^::: tritongemm\.(\w+)$", text)) == sorted({*tritongemm.__all__} - {"__version__"})


def test_every_kind_of_plugin_has_a_page_with_the_methods_to_fill() -> None:
    """A page names each method that its kind's contract leaves open."""
    pages = {page.stem for page in (DOCS / "plugins").glob("*.md")}
    kinds = [cls for cls in _contracts() if contracts.Plugin in cls.__bases__]
    wanted = {cls.kind.replace(" ", "_") for cls in kinds} | {"evaluator", "target", "template", "index"}
    assert pages == wanted
    table = (DOCS / "plugins/index.md").read_text()
    for cls in kinds:
        page, folder = cls.kind.replace(" ", "_"), cls.package.replace(".", "/")
        assert f"| [{cls.kind}]({page}.md) | `{cls.__name__}` | `{folder}/` |" in table
        assert list(doc_pages.snippets((DOCS / "plugins" / f"{page}.md").read_text())), f"{page}.md shows no example"
    for cls in _contracts():
        if cls.kind:
            text = (DOCS / "plugins" / f"{cls.kind.replace(' ', '_')}.md").read_text()
            assert not [name for name in cls.__abstractmethods__ if f"{name}(" not in text], cls.__name__


def test_tables_of_the_architecture_are_those_of_the_code() -> None:
    text = (DOCS / "architecture.md").read_text().partition("## Who may import whom")[2].partition("## ")[0]
    table: dict[str, tuple[int, set[str]]] = {}
    for level, packages, allowed in re.findall(r"(?m)^\| (\d) \| ([\w, ]+) \| ([^|]+) \|$", text):
        others = set(allowed.split(", ")) if not allowed.startswith(("nothing", "all ")) else set()
        table |= {name: (int(level), others) for name in packages.split(", ")}
    table["cli"] = (table["cli"][0], table.keys() - {"cli", "integrations"})
    assert table == {name: (level, ALLOWED[name]) for name, level in LEVELS.items()}
    text = (DOCS / "architecture.md").read_text().partition("## Life of a size")[2].partition("## ")[0]
    rows = re.findall(r"(?m)^\| `(\w+)` \| .+ \| ([^|]*) ?\|$", text)
    assert {state: set(re.findall(r"`(\w+)`", following)) for state, following in rows} == {
        state.value: {one.value for one in following} for state, following in NEXT_STATES.items()
    }


def test_every_page_is_in_the_menu_and_the_site_fetches_nothing() -> None:
    menu = list(_nav(yaml.safe_load(CONFIG.read_text())["nav"]))
    assert len(menu) == len(set(menu)) and set(menu) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    for folder in ("measurements", "decisions", "plugins", "how-to/coming-from"):
        index = (DOCS / folder / "index.md").read_text()
        others = {p.name for p in (DOCS / folder).glob("*.md")} - {"index.md"}
        assert others <= {target for _, target in doc_pages.links(index)}
    config = yaml.safe_load(CONFIG.read_text())
    assert config["theme"]["font"] is False and not {"extra_css", "extra_javascript"} & config.keys()
    search, strings = config["plugins"]
    assert search == "search" and strings["mkdocstrings"]["handlers"]["python"]["inventories"] == []
    assert not [page for page in PAGES if "```mermaid" in page.read_text()]


def test_the_readme_is_short_and_measurements_say_when_where_and_how() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    for page in (DOCS / "measurements").glob("[!i]*.md"):
        text = page.read_text()
        for row in (r"\| Date \| .*\d{4}-\d{2}-\d{2}", r"\| Machine \| \w", r"\| Command \| \S"):
            assert re.search(row, text), f"{_id(page)} lacks {row}"
        assert len(doc_pages.prose(text)) <= PROSE_LINES, _id(page)


def test_the_checks_see_what_is_wrong() -> None:
    text = (
        "# A `b` title\n\n[x](y.md#z) `[no](link)` `scripts/absent` `tritongemm.core.absent`\n\n```\n--absent a\n```\n"
    )
    assert doc_pages.anchors(text + "# A b title\n") == {"a-b-title", "a-b-title_1"}
    assert list(doc_pages.links(text)) == [(3, "y.md#z")]
    (path,) = doc_pages.mentioned_paths("page", text)
    assert path.text == "scripts/absent" and not doc_pages.path_exists(path.text)
    (module,) = doc_pages.mentioned_modules("page", text)
    assert not doc_pages.member_exists(module.text) and doc_pages.member_exists("tritongemm.core.problem.Problem")
    (option,) = doc_pages.mentioned_options("page", text)
    assert (option.line, option.text) == (6, "--absent") and not _is_option(option.text, _all_options())
    assert _is_option("--gemm_size_file", _all_options())


def test_the_page_of_templates_has_every_fact() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "plugins/template.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    header = {f.name for f in fields(KernelTemplate)} - {"name"} | {"names", "inherit"}
    sections = {f.name for section in (SearchFacts, OrderFacts) for f in fields(section)}
    assert sorted(set(listed)) == sorted(header | sections)
