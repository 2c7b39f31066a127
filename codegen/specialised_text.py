"""Writes the text of a module whose config is fixed: constant parts are computed, and the rest stays as written.

Branches that can't run are gone, with the functions, parameters and variables that only they use. Comments stay.
"""

import ast
import io
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any

from tritongemm.codegen.constant_folding import UNKNOWN, ExpressionFolder, ModuleFunction, is_number, literal, names_in
from tritongemm.codegen.source_trees import parse
from tritongemm.codegen.wrapped_lines import WIDTH, wrap


def specialise(text: str, roots: Sequence[str], constants: Mapping[str, Any]) -> str:
    """Return the text of a module with the constants of one config.

    What `roots`, the functions that a caller calls, do not reach is left out. `constants` are values of the names that
    it hands to kernels; those that kernels still need become constants of the module, behind its own.
    """
    return _Specialiser(text, roots, dict(constants)).write()


class _Specialiser(ExpressionFolder):
    def __init__(self, text: str, roots: Sequence[str], constants: dict[str, Any]) -> None:
        super().__init__(text, constants)
        self._roots = [root for root in roots if root in self.functions]
        comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
        self._alone = {t.start[0]: t.string for t in comments if t.line.lstrip().startswith("#")}
        self._beside = {t.start[0]: t.string for t in comments if t.start[0] not in self._alone}

    def write(self) -> str:
        """Return the complete module: imports first, then what is reached in the order of the text."""
        self._propagate()
        for function in self.functions.values():
            function.dropped = {n for n, v in function.known.items() if v is not UNKNOWN and not isinstance(v, dict)}
        texts = self._leave_out_unread()
        kept = [top for top in self.tree.body if not isinstance(top, ast.FunctionDef) or top.name in texts]
        read = set().union(*(self.functions[name].read for name in texts))
        for top in kept:
            if isinstance(top, ast.Assign) and names_in(top, ast.Store) & read:
                read |= names_in(top, ast.Load)
        imports, rest, end, gap = list[str](), list[str](), 0, 0
        for top in self.tree.body[1:]:
            decorators = top.decorator_list if isinstance(top, ast.FunctionDef) else []
            first = min([top.lineno, *(d.lineno for d in decorators)])
            comments = [self._alone[n] for n in range(end + 1, first) if n in self._alone]
            gap, end = max(gap, min(first - end - 1 - len(comments), 2)), top.end_lineno or 0
            if isinstance(top, ast.Import | ast.ImportFrom):
                imports += [*[""] * (gap == 1 and bool(imports)), *_import(top, read)]
                gap = 0
            elif isinstance(top, ast.FunctionDef) and top.name in texts:
                rest += ["", "", *comments, *texts[top.name].splitlines()]
                gap = 2
            elif isinstance(top, ast.Assign) and names_in(top, ast.Store) & read:
                text = self.slice(top)
                for fields in (self.tuples[name] for name in names_in(top, ast.Store) & self.tuples.keys()):
                    text = text.replace(" ".join(fields), " ".join(f for f in fields if f not in self.unread_fields))
                rest += [*[""] * gap, *comments, *self._line(text, end)]
                gap = 0
        needed = set().union(*(self.functions[name].named for name in texts))
        own = [f"{name} = tl.constexpr({value})" for name, value in self._constants.items() if name in needed]
        head = [*self.slice(self.tree.body[0]).splitlines(), "", *imports, ""]
        return "\n".join([*head, *own, *rest]).rstrip("\n") + "\n"

    def _propagate(self) -> None:
        """Find the constant arguments with which each function is called."""
        waiting = {*self._roots}
        for name in waiting:
            self.functions[name].reached = True
        while waiting:
            for name in waiting:
                self._write(self.functions[name])
            waiting = set()
            found: dict[str, dict[str, Any]] = {}
            for name, given in (call for f in self.functions.values() if f.reached for call in f.calls):
                known = found.setdefault(name, given)
                found[name] = {p: v if given[p] == v else UNKNOWN for p, v in known.items()}
            for name, known in found.items():
                function = self.functions[name]
                if not function.reached or function.known != known:
                    waiting.add(name)
                function.reached, function.known = True, known

    def _leave_out_unread(self) -> dict[str, str]:
        """Return the texts of the functions that are called, without parameters and variables that nothing reads."""
        texts: dict[str, str] = {}
        waiting = {name for name, function in self.functions.items() if function.reached}
        while waiting:
            changed = set()
            for name in waiting:
                function, text = self.functions[name], self._write(self.functions[name])
                read = function.read = _read(text)
                texts[name] = text
                if function.compiled:
                    unread = set(function.parameters) - read - function.dropped
                    variables = function.assigned - read - function.unread
                    if unread or variables:
                        changed.add(name)
                    function.dropped |= unread
                    function.unread |= variables
            called = {n for n, f in self.functions.items() if f.reached and changed & {name for name, _ in f.calls}}
            waiting = changed | called
            fields = {field for fields in self.tuples.values() for field in fields}
            unread = {f for f in fields if not any("." + f in self.functions[name].read for name in texts)}
            if not waiting and unread != self.unread_fields:
                waiting, self.unread_fields = {*texts}, unread
        return {name: texts[name] for name in self.functions if name in texts}

    def _write(self, function: ModuleFunction) -> str:
        tree, args = function.tree, function.tree.args.args
        self.here, function.calls, function.named = function, [], set()
        self.env = {n: v for n, v in function.known.items() if v is not UNKNOWN}
        if not function.compiled:
            self.env |= self._constants
        parameters = []
        for arg in args:
            if arg.arg not in function.dropped:
                default = function.defaults.get(arg.arg)
                equals = " = " if arg.annotation else "="
                parameters.append(self.slice(arg) + (equals + self.slice(default) if default else ""))
        lines = [f"@{self.slice(d)}" for d in tree.decorator_list]
        lines += wrap(f"def {tree.name}({', '.join(parameters)}):")
        header = max([tree.lineno, *(a.end_lineno or 0 for a in args)])
        return "\n".join([*lines, *(self._block(tree.body, "    ", header) or ["    pass"])])

    def _block(self, statements: Sequence[ast.stmt], pad: str, after: int) -> list[str]:
        """Return the lines of the statements behind line `after`, with the comments above them."""
        lines: list[str] = []
        for statement in statements:
            comments = [pad + self._alone[n] for n in range(after + 1, statement.lineno) if n in self._alone]
            after = statement.end_lineno or 0
            if written := self._statement(statement, pad):
                lines += comments + written
        return lines

    def _statement(self, node: ast.stmt, pad: str) -> list[str]:
        end = node.end_lineno or 0
        if isinstance(node, ast.If):
            return self._if(node, pad, "if")
        if isinstance(node, ast.For | ast.While):
            head = node.iter if isinstance(node, ast.For) else node.test
            start = f"for {self.slice(node.target)} in" if isinstance(node, ast.For) else "while"
            line = self._line(f"{pad}{start} {self.fold(head)}:", head.end_lineno or 0)
            body = self._block(node.body, pad + "    ", head.end_lineno or 0)
            return [*line, *body] if body else []
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            value = self.env[node.target.id] = self.value(node.value)
            if node.target.id in self.here.unread:
                return []
            text = self.fold(node.value) if value is UNKNOWN else literal(value)
            return self._line(f"{pad}{node.target.id}: {self.slice(node.annotation)} = {text}", end)
        if isinstance(node, ast.Assign) and _targets(node) <= self.here.unread and self._is_pure(node.value):
            return []
        if isinstance(node, ast.AugAssign) and (is_number(self.value(node.value), 0) or not self._is_read(node)):
            return []
        return self._line(pad + self.fold_parts(node), end)

    def _is_read(self, node: ast.AugAssign) -> bool:
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        return name not in self.here.unread | self.here.dropped or not self._is_pure(node.value)

    def _is_pure(self, value: ast.expr) -> bool:
        """Return whether evaluating an expression has no effect; it may make named tuples."""
        if isinstance(value, ast.IfExp) and (test := self.decide(value.test)) is not UNKNOWN:
            return self._is_pure(value.body if test else value.orelse)
        return all(self._fields_made(n) for n in ast.walk(value) if isinstance(n, ast.Call))

    def _if(self, node: ast.If, pad: str, word: str) -> list[str]:
        end = node.test.end_lineno or 0
        test = self.decide(node.test)
        if test is not UNKNOWN:
            chosen, after = (node.body, end) if test else (node.orelse, node.body[-1].end_lineno or 0)
            return self._block(chosen, pad, after)
        body = self._block(node.body, pad + "    ", end)
        after, rest = node.body[-1].end_lineno or 0, node.orelse
        while len(rest) == 1 and isinstance(rest[0], ast.If) and (test := self.decide(rest[0].test)) is not UNKNOWN:
            after = (rest[0].test if test else rest[0].body[-1]).end_lineno or 0
            rest = rest[0].body if test else rest[0].orelse
        if len(rest) == 1 and isinstance(rest[0], ast.If):
            others = self._if(rest[0], pad, "elif")
        else:
            others = self._block(rest, pad + "    ", after)
            others = [pad + "else:", *others] if others else []
        if not body and not others:
            return []
        return [*self._line(f"{pad}{word} {self.fold(node.test)}:", end), *(body or [pad + "    pass"]), *others]

    def _line(self, text: str, end: int) -> list[str]:
        """Return the lines of a statement, with the comment beside its last one."""
        lines, comment = wrap(text), self._beside.get(end, "")
        if not comment:
            return lines
        if len(lines) == 1 and len(text) + 2 + len(comment) <= WIDTH:
            return [f"{text}  {comment}"]
        return [text[: len(text) - len(text.lstrip())] + comment, *lines]


def _import(node: ast.Import | ast.ImportFrom, read: set[str]) -> list[str]:
    """Return an import of the names that are read, if there are any."""
    node.names = [n for n in node.names if (n.asname or n.name) in read]
    if not node.names:
        return []
    text = ast.unparse(node)
    start, _, listed = text.partition(" import ")
    return [text] if len(text) <= WIDTH else wrap(f"{start} import ({listed})")


def _read(text: str) -> set[str]:
    """Return the names that a function reads, attributes behind a point; one only added to does not count."""
    found = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add("." + node.attr)
        elif isinstance(node, ast.AugAssign) and any(isinstance(n, ast.Call) for n in ast.walk(node.value)):
            found |= names_in(node.target, ast.Store)
    return found


def _targets(statement: ast.Assign) -> set[str]:
    """Return the names that a statement assigns, and "" where it assigns anything else."""
    first = statement.targets[0]
    return {t.id if isinstance(t, ast.Name) else "" for t in (first.elts if isinstance(first, ast.Tuple) else [first])}
