"""Edits the text of expressions whose constants are known, and changes as few characters as it can."""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tritongemm.codegen.source_trees import parse
from tritongemm.codegen.wrapped_lines import join

UNKNOWN = object()  # a value that only a launch decides
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.LShift: operator.lshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_Edit = tuple[int, int, str]


@dataclass
class ModuleFunction:
    """A function of the generated module and what is known of it so far."""

    tree: ast.FunctionDef  # its definition
    known: dict[str, Any] = field(default_factory=dict)  # values of its parameters that all calls agree in
    # Functions that it calls, with the values of their parameters.
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    reached: bool = False  # it is called, as far as is known
    dropped: set[str] = field(default_factory=set)  # parameters that are left out
    unread: set[str] = field(default_factory=set)  # variables that nothing reads
    named: set[str] = field(default_factory=set)  # constants of the module that it reads
    read: set[str] = field(default_factory=set)  # all names that its text reads, and attributes behind a point

    @cached_property
    def parameters(self) -> list[str]:
        """The names of its parameters, in order."""
        return [a.arg for a in self.tree.args.args]

    @cached_property
    def compiled(self) -> bool:
        """Whether Triton compiles it."""
        return any("jit" in ast.unparse(d) for d in self.tree.decorator_list)

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The values of parameters that a call can leave out."""
        values = self.tree.args.defaults
        return dict(zip(self.parameters[len(self.parameters) - len(values) :], values, strict=True))

    @cached_property
    def constants(self) -> set[str]:
        """Parameters that the compiler takes as constants."""
        return {a.arg for a in self.tree.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)}

    @cached_property
    def assigned(self) -> set[str]:
        """The names of its variables."""
        return names_in(self.tree, ast.Store)


class ExpressionFolder:
    """Writes the expressions of a module's functions with their constant parts computed.

    Attributes:
        tree: the module.
        functions: by their names.
        tuples: fields of the named tuples by which functions hand on several values, by the tuples' names.
        unread_fields: those of all of them that nothing reads.
        here: the function under way.
        env: what is known of its names.
    """

    def __init__(self, text: str, constants: dict[str, Any]) -> None:
        self.tree = parse(text)
        self.functions = {s.name: ModuleFunction(s) for s in self.tree.body if isinstance(s, ast.FunctionDef)}
        self.tuples = dict(made for s in self.tree.body if (made := _named_tuple(s)))
        self.unread_fields: set[str] = set()
        self.here = next(iter(self.functions.values()))
        self.env: dict[str, Any] = {}
        self._text, self._constants = text, constants
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._children: dict[ast.AST, list[ast.AST]] = {}
        self._named: dict[ast.AST, set[str]] = {}
        self._note_names(self.tree)

    def _note_names(self, node: ast.AST) -> set[str]:
        """Note the children and the names of every node."""
        children = [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.expr_context | ast.operator)]
        # Before Python 3.12 parts of a formatted string have no places of their own.
        self._children[node] = [] if isinstance(node, ast.JoinedStr) else children
        names = {node.id} if isinstance(node, ast.Name) else set[str]()
        for child in self._children[node]:
            names |= self._note_names(child)
        self._named[node] = names
        return names

    def decide(self, node: ast.expr) -> Any:
        """Return whether a condition holds, where constants decide it."""
        if isinstance(node, ast.BoolOp):
            answers = [self.decide(v) for v in node.values]
            either = isinstance(node.op, ast.Or)
            if any(a is not UNKNOWN and a == either for a in answers):
                return either
            return UNKNOWN if UNKNOWN in answers else not either
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            answer = self.decide(node.operand)
            return answer if answer is UNKNOWN else not answer
        value = self.value(node)
        return value if value is UNKNOWN else bool(value)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, where constants decide it."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.env.get(node.id, UNKNOWN)
        if isinstance(node, ast.IfExp):
            test = self.decide(node.test)
            return test if test is UNKNOWN else self.value(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp):
            values = [self.value(v) for v in node.values]
            if isinstance(node.op, ast.And) and self.decide(node) is False:
                return False
            decisive = [v for v in values[:-1] if bool(v) == isinstance(node.op, ast.Or)]
            return UNKNOWN if UNKNOWN in values else (decisive or values[-1:])[0]
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand)
            return value if value is UNKNOWN else _UNARY[type(node.op)](value)
        if isinstance(node, ast.BinOp):
            return self._result(node, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left), self.value(node.comparators[0])
            known = left is not UNKNOWN and right is not UNKNOWN
            return _BINARY[type(node.ops[0])](left, right) if known else UNKNOWN
        if isinstance(node, ast.Tuple):
            values = [self.value(v) for v in node.elts]
            return UNKNOWN if UNKNOWN in values else tuple(values)
        if isinstance(node, ast.Attribute):
            holder = self.value(node.value)
            return holder.get(node.attr, UNKNOWN) if isinstance(holder, dict) else UNKNOWN
        return self._result_of_call(node) if isinstance(node, ast.Call) else UNKNOWN

    def _result_of_call(self, node: ast.Call) -> Any:
        """Return what a call returns; for a named tuple what is known of each field."""
        if fields := self._fields_made(node):
            return dict(zip(fields, map(self.value, node.args), strict=True))
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            values = [self.value(v) for v in node.args]
            return UNKNOWN if UNKNOWN in values else (min if node.func.id == "min" else max)(values)
        return UNKNOWN

    def _fields_made(self, node: ast.Call) -> list[str]:
        """Return the fields of the named tuple that a call makes; none where it makes none."""
        return self.tuples.get(node.func.id, []) if isinstance(node.func, ast.Name) else []

    @staticmethod
    def _result(node: ast.BinOp, left: Any, right: Any) -> Any:
        if isinstance(node.op, ast.Mult) and (is_number(left, 0) or is_number(right, 0)):
            return 0
        if isinstance(node.op, ast.Mod) and is_number(right, 1):
            return 0
        known = left is not UNKNOWN and right is not UNKNOWN and type(node.op) in _BINARY
        return _BINARY[type(node.op)](left, right) if known else UNKNOWN

    def fold(self, node: ast.expr) -> str:
        """Return the text of an expression, with its constant parts computed."""
        return join(_edited(self._text, *self._span(node), list(self._edits(node))))

    def fold_parts(self, node: ast.stmt) -> str:
        """Return the text of a statement in one line, with its constant parts computed."""
        return join(_edited(self._text, *self._span(node), list(self._edits_below(node))))

    def _edits(self, node: ast.AST) -> Iterator[_Edit]:
        if self._named[node].isdisjoint(self.env.keys() | self.functions.keys() | self.tuples.keys()):
            return
        if isinstance(node, ast.expr) and (text := self._folded(node)) is not None:
            yield (*self._span(node), text)
        else:
            yield from self._edits_below(node)

    def _edits_below(self, node: ast.AST) -> Iterator[_Edit]:
        for child in self._children[node]:
            yield from self._edits(child)

    def _folded(self, node: ast.expr) -> str | None:
        """Return the text that an expression becomes, where that is no plain join of its parts."""
        if isinstance(node, ast.Name):
            stored = isinstance(node.ctx, ast.Store) or node.id in self.here.assigned
            return None if stored else self._known(node, node.id)
        if isinstance(node, ast.Attribute):
            return self._known(node, node.attr)
        if isinstance(node, ast.Call | ast.Tuple) and (text := self._call(node)) is not None:
            return text
        value = UNKNOWN if isinstance(node, ast.Tuple) else self.value(node)
        if value is not UNKNOWN:
            return literal(value)
        if isinstance(node, ast.IfExp) and (test := self.decide(node.test)) is not UNKNOWN:
            return self.fold(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp):
            kept = [v for v in node.values if self.decide(v) is UNKNOWN]
            word = " and " if isinstance(node.op, ast.And) else " or "
            inside = len(kept) > 1
            return word.join(self._operand(v, inside and isinstance(v, ast.BoolOp | ast.IfExp)) for v in kept)
        return self._without_identity(node) if isinstance(node, ast.BinOp) else None

    def _known(self, node: ast.expr, name: str) -> str | None:
        """Return the text of a known variable or field: the module's constant of its name, or the value."""
        value = self.value(node)
        if value is UNKNOWN or isinstance(value, dict):
            return None
        if self.here.compiled and self._constants.get(name, UNKNOWN) == value:
            self.here.named.add(name)
            return name
        return literal(value)

    def _without_identity(self, node: ast.BinOp) -> str | None:
        """Return the other operand of an addition of 0, or a multiplication or division by 1."""
        left, right = self.value(node.left), self.value(node.right)
        factor = isinstance(node.op, ast.Mult | ast.FloorDiv)
        term = isinstance(node.op, ast.Add | ast.Sub)
        if (factor and is_number(right, 1)) or (term and is_number(right, 0)):
            other = node.left
        elif (factor and is_number(left, 1)) or (term and is_number(left, 0)):
            if isinstance(node.op, ast.FloorDiv | ast.Sub):
                return None
            other = node.right
        else:
            return None
        sum_ = isinstance(other, ast.BinOp) and not isinstance(other.op, ast.Mult | ast.FloorDiv | ast.Mod)
        return self._operand(other, isinstance(other, ast.BoolOp | ast.IfExp | ast.Compare) or (factor and sum_))

    def _operand(self, node: ast.expr, grouped: bool) -> str:
        text = self.fold(node)
        return f"({text})" if grouped and not text.isalnum() else text

    def _call(self, node: ast.Call | ast.Tuple) -> str | None:
        """Return a call of one of the module's functions, or of a pair of a function and its arguments."""
        if isinstance(node, ast.Call) and (fields := self._fields_made(node)):
            read = (self.fold(v) for f, v in zip(fields, node.args, strict=True) if f not in self.unread_fields)
            return f"{self.slice(node.func)}({', '.join(read)})"
        if isinstance(node, ast.Call):
            callee, args, keywords = node.func, node.args, node.keywords
        elif len(node.elts) == 2 and isinstance(node.elts[1], ast.Tuple):
            callee, args, keywords = node.elts[0], node.elts[1].elts, []
        else:
            return None
        name = callee.value if isinstance(callee, ast.Subscript) else callee
        if not (isinstance(name, ast.Name) and name.id in self.functions):
            return None
        function = self.functions[name.id]
        given = list(zip(function.parameters, args, strict=False))
        every = function.defaults | dict(given) | {k.arg: k.value for k in keywords if k.arg}
        values = {p: self.value(v) for p, v in every.items()}
        values = {p: v for p, v in values.items() if p in function.constants or isinstance(v, dict)}
        self.here.calls.append((name.id, values))
        kept = [self.fold(v) for p, v in given if p not in function.dropped]
        kept += [f"{k.arg}={self.fold(k.value)}" for k in keywords if k.arg not in function.dropped]
        inside = ", ".join(kept)
        if isinstance(node, ast.Tuple):
            return f"({self.fold(callee)}, ({inside}{',' if len(kept) == 1 else ''}))"
        return f"{self.fold(callee)}({inside})"

    def slice(self, node: ast.AST) -> str:
        """Return the text of a node as it was written."""
        start, end = self._span(node)
        return self._text[start:end]

    def _span(self, node: Any) -> tuple[int, int]:
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset


def _named_tuple(statement: ast.stmt) -> tuple[str, list[str]] | None:
    """Return the name and the fields of a named tuple that a statement of a module makes."""
    found = re.fullmatch(r"(\w+) = namedtuple\('\1', '([\w ]+)'\)", ast.unparse(statement))
    return (found[1], found[2].split()) if found else None


def is_number(value: Any, number: int) -> bool:
    """Return whether a value is this integer (and no bool)."""
    return type(value) is int and value == number


def literal(value: Any) -> str:
    """Return a value as it is written in a module."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _edited(text: str, start: int, end: int, edits: list[_Edit]) -> str:
    """Return a part of a text with edits applied; brackets around a single name, number or call are dropped."""
    parts, at = [], start
    for first, last, new in sorted(edits):
        while (
            re.fullmatch(r"[\w.]+(\([\w., ]*\))?", new)
            and at < first
            and last < end
            and (text[first - 1], text[last]) == ("(", ")")
            and not re.match(r"[\w\])]", text[first - 2])
        ):
            first, last = first - 1, last + 1
        parts += [text[at:first], new]
        at = last
    return "".join([*parts, text[at:end]])


def names_in(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a text loads, or those that it stores."""
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}
