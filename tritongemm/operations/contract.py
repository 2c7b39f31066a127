"""The contract of an operation, which is one value: its schema, its operands, what they mean, and PyTorch's result.

A file of this package holds one. Serving calls, traces and explains it, and captures write what it is called for.
"""

from __future__ import annotations

import importlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.operations.checks import check_kind, check_values
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Plugin

_KINDS = {"ScalarType": torch.dtype, "str": str, "bool": bool}  # of arguments that are no tensors, as schemas name them
ReadyCall: TypeAlias = Callable[..., Tensor]  # computes calls of one kind; is given an operation's operands


class Strides(NamedTuple):
    """The memory layout of an operand of a batch, in elements."""

    lead: int  # from one of its stored rows to the next; 0 of a vector
    apart: int  # from one product's to the next one's; 0 where all share it


@dataclass(frozen=True)
class Reading:
    """What the operands of a call mean; holds for all of their shapes, strides and dtypes."""

    problems: tuple[Problem, ...]  # those that the call can be taken for, the best first
    tensors: Mapping[str, Tensor]  # the operands as kernels read them, by the names of a problem's; some may be copies
    result: tuple[tuple[int, ...], torch.dtype]  # shape and dtype of the result
    strides: Mapping[str, Strides] = field(default_factory=dict)  # of operands that need not be dense, by their names
    plain: Problem | None = None  # the product without its scale factors, where there are no problems with them
    why_none: str = ""  # why there are none; "" where there are
    vector: bool = False  # whether the first operand has one dimension, which is another operation to PyTorch

    def moved(self, problem: Problem) -> dict[str, Strides]:
        """Return the strides of the operands that differ from those of a problem, which are dense and in order."""
        usual = {name: Strides(_dense_lead(problem, name), _dense_apart(problem, name)) for name in problem.operands}
        return {name: strides for name, strides in self.strides.items() if strides != usual[name]}


class Operation(Plugin, abstract=True):
    """An operation that a program can call."""

    package = "tritongemm.operations"
    kind = "operation"
    schema: ClassVar[str]  # its name, operands and result, as torch.library writes them
    # A named tuple of them, in the order of the schema; others that have defaults may follow.
    operands: ClassVar[Callable[..., Any]]
    # The operand that each of a problem's is read from, where it has another name.
    sources: ClassVar[Mapping[str, str]] = {}
    # Other functions that compute it, and what makes the operands of their arguments.
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Name an operation as its schema does; its check refuses arguments of another kind than the schema's first."""
        super().__init_subclass__(abstract=abstract, **more)
        if not abstract:
            cls.name = cls.schema.partition("(")[0]
        if not abstract and "check" in vars(cls):
            setattr(cls, "check", _after_kinds(cls.schema, cls.check))  # noqa: B010 (mypy takes no other assignment)

    @abstractmethod
    def check(self, given: Any) -> Any:
        """Return the operands as the other methods take them. Nothing is read but shapes, strides, dtypes and devices.

        Raises:
            TypeError: one is no tensor.
            InputError: they do not belong together; names the operand, what it is and what it may be.
        """

    @abstractmethod
    def infer(self, given: Any) -> Tensor:
        """Return a result without contents for operands without contents."""

    @abstractmethod
    def products(self, given: Any) -> Iterator[tuple[ProductOperation, Any]]:
        """Yield the products that a call computes, with checked operands, by shapes, strides and types."""

    @abstractmethod
    def fallback(self, checked: Any) -> Tensor:
        """Return PyTorch's result, with gradients."""

    def is_cast(self, given: Any) -> bool:
        """Return whether autocast changes the types of operands, as it does those of PyTorch's own products."""
        return False


class ProductOperation(Operation, abstract=True):
    """An operation that one kernel may compute."""

    @abstractmethod
    def read(self, checked: Any) -> Reading | Support:
        """Return what checked operands mean, on any device, or why no kernel could compute the call."""

    def tensors(self, checked: Any) -> Mapping[str, Tensor]:
        """Return the operands as kernels read them, by the names of a problem's."""
        given, sources = checked._asdict(), self.sources
        named = {name: given[operand] for name, operand in sources.items()}
        named |= {name: value for name, value in given.items() if name not in sources.values()}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def products(self, given: Any) -> Iterator[tuple[ProductOperation, Any]]:
        """Yield the operation itself."""
        yield self, self.check(given)

    def infer(self, given: Any) -> Tensor:
        """Return a result as `read` says."""
        reading = self.read(self.check(given))
        if isinstance(reading, Support):
            raise InputError(f"{self.name}: {reading}")
        shape, dtype = reading.result
        return next(iter(reading.tensors.values())).new_empty(shape, dtype=dtype)

    def make_fallback(self, checked: Any) -> ReadyCall:
        """Return what computes calls like this one by PyTorch, after a look at what their shapes do not say."""
        return partial(_compute, self)


def _after_kinds(schema: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation's check behind one of the kinds of its arguments that are no tensors."""
    arguments = [(one.name, str(one.real_type)) for one in torch._C.parse_schema(schema).arguments]
    named = [(name, kind.removeprefix("Optional[").removesuffix("]")) for name, kind in arguments]
    kinds = [(place, name, _KINDS[kind]) for place, (name, kind) in enumerate(named) if kind in _KINDS]

    @wraps(check)
    def check_all(self: Operation, given: Any) -> Any:
        for place, name, kind in kinds:
            check_kind(name, given[place], kind)
        return check(self, given)

    return check_all


def _compute(operation: ProductOperation, *given: Any) -> Tensor:
    checked = operation.check(operation.operands(*given))
    check_factors_are_numbers(checked)
    return operation.fallback(checked)


def check_factors_are_numbers(given: Any) -> None:
    """Refuse scale factors on a CPU that are NaN or infinite.

    Raises:
        InputError: names the operand.
    """
    named = given._asdict()
    check_values(**{name: named[name] for name in ("scale_a", "scale_b") if isinstance(named.get(name), Tensor)})


def every() -> Iterator[Operation]:
    """Yield all operations, in the order of their files; one whose file is broken is passed over with a warning."""
    for file in registry.names(Operation):
        try:
            module = importlib.import_module(f"{Operation.package}.{file}")
        except Exception as error:
            warnings.warn(f"operations of {file} are passed over: {type(error).__name__}: {error}", stacklevel=2)
            continue
        for value in vars(module).values():
            if isinstance(value, Operation) and type(value).__module__ == module.__name__:
                yield value


def bind(call: str, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Operation, Any]:
    """Return the operation that a function computes, and its operands.

    Raises:
        InputError: there is no such function; lists those there are.
        TypeError: they are not its arguments.
    """
    known: list[str] = []
    for operation in every():
        calls = {operation.name: operation.operands, **operation.calls}
        if call in calls:
            return operation, calls[call](*args, **named)
        known += calls
    raise InputError(f"no operation is called {call!r}; there are: {', '.join(sorted(known))}")


def _dense_lead(problem: Problem, name: str) -> int:
    if name == "a":
        return problem.k // problem.a.type.packed if problem.a.row_major else problem.m
    if name == "b":
        return problem.n if problem.b.row_major else problem.k // problem.b.type.packed
    return problem.columns if name == "c" else 0


def _dense_apart(problem: Problem, name: str) -> int:
    spec = problem.operands[name]
    return 0 if problem.batch > 1 and not spec.batch else prod(spec.shape) // spec.dtype.packed
