"""No code names a plug-in or a template outside its own folder: facts and contracts are asked instead."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.cpu.architecture import source_tree
from tests.cpu.architecture.offenders import check

ALLOWED = {  # comparison as the test below names it: a sentence that says why it may stay
    "core.config: self.backend == DEFAULT_BACKEND": "names of configs without a backend's are in files since the first",
    "core.problem: self.family != DEFAULT_FAMILY": "keys of problems without a family's are in files since the first",
}

_OPERATORS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def _is_under(path: Path, owner: Path) -> bool:
    return path == owner or owner in path.parents


def test_no_plug_in_is_imported_by_name() -> None:
    """But by its own files, and files whose name begins with an underscore by the plug-ins beside them."""
    offenders = []
    folders = source_tree.plugin_folders()
    for module, path in source_tree.FILES.items():
        for line in source_tree.imports(module):
            package = next((p for p in source_tree.PLUGIN_PACKAGES if line.imported.startswith(f"{p}.")), None)
            if package is None:
                continue
            name = line.imported.removeprefix(f"{package}.").split(".")[0]
            if name.startswith("_"):
                inside = module.startswith(package)
            else:
                inside = any(_is_under(path, owner) for owner in folders.get(name, ()))
            if not inside:
                offenders.append(str(line))
    check("plug-ins are imported by the registry alone", offenders, "ask tritongemm.plugins.registry (docs/plugins)")


def _constants() -> dict[str, str]:
    """Texts that modules of the package give a name at their first level: where two differ, neither."""
    found: dict[str, set[str]] = {}
    for path in source_tree.FILES.values():
        for node in source_tree.syntax(path).body:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                for target in targets:
                    found.setdefault(ast.unparse(target), set()).add(value.value)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _texts(node: ast.expr, constants: dict[str, str]) -> Iterator[str]:
    """The texts that an operand of a comparison is, holds or names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in constants:
            yield constants[name]
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from _texts(element, constants)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from _texts(key, constants)


def _compared(path: Path, constants: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(a text, the comparison that names it) for each comparison, pattern and call of the registry in a file."""
    for node in source_tree.nodes(path):
        if isinstance(node, ast.Compare) and any(isinstance(op, _OPERATORS) for op in node.ops):
            # The kind of a kernel parameter is `tma` too, whichever template or assembly kernel has it.
            if isinstance(node.left, ast.Attribute) and node.left.attr == "kind":
                continue
            for operand in (node.left, *node.comparators):
                yield from ((text, ast.unparse(node)) for text in _texts(operand, constants))
        elif isinstance(node, ast.MatchValue):
            yield from ((text, f"case {ast.unparse(node)}") for text in _texts(node.value, constants))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("registry."):
            for argument in node.args:
                yield from ((text, ast.unparse(node)) for text in _texts(argument, constants))


def test_no_name_is_compared_with() -> None:
    names, constants = source_tree.plugin_folders(), _constants()
    names |= {template: set() for template in source_tree.template_names()}
    offenders = set()
    for module, path in source_tree.FILES.items():
        short = module.removeprefix(f"{source_tree.PACKAGE}.")
        for text, comparison in _compared(path, constants):
            if text in names and not any(_is_under(path, owner) for owner in names[text]):
                offenders.add(f"{short}: {comparison}")
    check(
        "no code compares with a plug-in's or a template's name",
        offenders,
        "ask its contract, its capabilities or the template's facts (docs/plugins)",
        ALLOWED,
    )
