"""Counts of the products that a program asked for, with its callers: the modules of a model, or functions."""

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tritongemm.workloads.capturing.counting import Counter
from tritongemm.workloads.capturing.group_spreads import GroupSpreads, Range, range_of
from tritongemm.workloads.capturing.product import BASIC, Product, of_aten, of_layer, of_nothing, of_own, without_memory

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


@dataclass
class Tally:
    """How often one product was asked for."""

    callers: set[str] = field(default_factory=set)  # of the product
    slow: int = 0  # calls that were counted one by one
    replayed: int = 0  # calls of graphs that were launched again
    # counter, slot: where the others are counted
    counter: Counter | None = None
    slot: int = 0
    # Of a product of groups, the range that the spreads of its rows are averaged over; None of others.
    spread_over: Range | None = None

    @property
    def calls(self) -> int:
        """All of them, but for those of graphs that were launched again."""
        return self.slow + (self.counter.read(self.slot) if self.counter else 0)


class Recorder:
    """Keeps the tallies of a process. Known layers are counted by `Counter`s; all other calls come here.

    `on_new` is called where a product, or a caller of it, is met for the first time.
    """

    def __init__(self, on_new: Callable[[], None]) -> None:
        self.with_gradient = False  # products were asked for of which autograd makes others
        self.spreads, self._of_parents = GroupSpreads(), list[GroupSpreads]()
        self._tallies: dict[Product, Tally] = {}
        self._known: dict[Any, tuple[Tally, ...]] = {}
        self._weights: dict[int, weakref.ref[Tensor]] = {}
        self._caller_of: dict[int, str] = {}
        self._counters: list[Counter] = []
        self._callers, self._on_new = Callers(), on_new
        self._lock = threading.RLock()  # a weight may be deleted while its own thread is here

    def __iter__(self) -> Iterator[tuple[Product, Tally]]:
        """Return every product with its tally."""
        return iter(list(self._tallies.items()))

    def add_counter(self, counter: Counter) -> None:
        """Have a counter learn the weights that are seen twice."""
        self._counters.append(counter)

    def enter_child(self) -> None:
        """Go on in a forked process, where a thread that held the lock is not, nor what the parent's GPUs write."""
        self._lock = threading.RLock()
        self._of_parents.append(self.spreads)  # whose memory only the parent may give back to CUDA
        self.spreads = GroupSpreads()

    def forget(self) -> None:
        """Look anew at what the next call of everything is."""
        self._known.clear()
        for counter in self._counters:
            counter.clear()

    def guarded(self, note: Callable[..., None]) -> Callable[..., None]:
        """Return a function that counts, such as `note_call`, and counts a call that fails as such."""

        def guarded(operation: str, *rest: Any) -> None:
            if torch._C._get_tracing_state() is not None:  # torch.jit.trace: sizes are no numbers
                return
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    note(operation, *rest)
            except Exception as error:
                with self._lock:
                    self._tally(
                        of_nothing(operation, f"a call that can't be followed: {type(error).__name__}")
                    ).slow += 1

        return guarded

    def note_layer(
        self, operation: str, counter: Counter, x: Tensor, w: Tensor, bias: Tensor | None, result: Tensor
    ) -> None:
        """Count a call of a layer that its counter does not know yet, and have it learn the weight."""
        with self._lock:
            if not (_has_memory(x) and _has_memory(w)):
                self._leave_out(operation, (x, w))
                return
            product = of_layer(operation, x, w, bias, result)
            if product is None:
                return
            tally = self._tally(product)
            tally.slow += 1
            name = self._caller_of.get(id(w))
            if name is None:
                name = self._caller_of[id(w)] = self._callers.find()
            self._add_caller(tally, name)
            self._note_gradient((x, w))
            if self._is_lasting(w) and not torch.is_autocast_enabled(x.device.type):
                if tally.counter is None:
                    tally.counter, tally.slot = counter, counter.slot()
                counter.learn(id(w), x.numel(), bias is not None, tally.slot)

    def note_call(
        self, operation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count a call of a function that multiplies."""
        given = [*args, *kwargs.values()]
        leaves = [x for one in given for x in (one if isinstance(one, list | tuple) else (one,))]
        try:
            kinds = [_kind(x) if isinstance(x, Tensor) else x for x in leaves]
            key = (operation, *kwargs, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), *kinds)
            known = self._known.get(key)
        except (RuntimeError, TypeError):  # sparse tensors have no strides, symbolic sizes are not distinguished
            key, known = None, None
        if known is None:
            with self._lock:
                known = self._note_new(operation, function, args, kwargs, [x for x in leaves if isinstance(x, Tensor)])
                if key is not None and known:
                    self._known[key] = known
        for tally in known:
            tally.slow += 1
        if known and known[0].spread_over:
            self.spreads.note(operation, args, kwargs, known[0].spread_over)

    def _note_new(
        self,
        operation: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> tuple[Tally, ...]:
        """Return the tallies of a call that was not known; none where it is a tracer's."""
        if not all(map(_has_memory, tensors)):
            self._leave_out(operation, tensors)
            return ()
        if not tensors:  # torch.fx, whose proxies are no tensors
            return ()
        tallies = tuple(self._tally(product) for product in decompose(operation, function, args, kwargs))
        for tally in tallies:
            self._add_caller(tally, self._callers.find())
        self._note_gradient(tensors)
        return tallies

    def _leave_out(self, operation: str, tensors: Any) -> None:
        """Count a call of tensors that are no plain memory; what a tracer runs is no call."""
        kinds = sorted({type(t).__name__ for t in tensors if not _has_memory(t)})
        if not any(_is_traced(t) for t in tensors):
            what = "sparse or nested tensors" if set(kinds) <= {"Tensor", "Parameter"} else ", ".join(kinds)
            tally = self._tally(of_nothing(operation, f"operands are {what}"))
            tally.slow += 1
            self._add_caller(tally, self._callers.find())

    def _tally(self, product: Product) -> Tally:
        if product not in self._tallies:
            over = range_of(product.groups, product.m) if product.groups > 1 and not product.room else None
            self._tallies[product] = Tally(spread_over=over)
            self._on_new()
        return self._tallies[product]

    def _add_caller(self, tally: Tally, name: str) -> None:
        if name and name not in tally.callers:
            tally.callers = {*tally.callers, name}  # the old set may be being read
            self._on_new()

    def _note_gradient(self, tensors: Any) -> None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self.with_gradient = True

    def _is_lasting(self, w: Tensor) -> bool:
        """Return whether a weight was seen before; one that is made for each call is not worth learning."""
        weight = id(w)
        if weight in self._weights:
            return True
        counters, weights, callers = self._counters, self._weights, self._caller_of

        def forget(_: object) -> None:
            weights.pop(weight, None)
            callers.pop(weight, None)
            for counter in counters:
                counter.forget(weight)

        self._weights[weight] = weakref.ref(w, forget)
        return False


def _kind(t: Tensor) -> tuple[Any, ...]:
    """Return all of an operand that decides which product is computed."""
    return type(t), t.shape, t.stride(), t.dtype, t.device


def _has_memory(t: Tensor) -> bool:
    """Return whether a tensor is dense memory, of PyTorch's own class or of one that only adds to it."""
    kind = type(t)
    if kind is not Tensor and kind is not torch.nn.Parameter and kind.__torch_dispatch__ is not _NO_DISPATCH:
        return False
    return t.layout is torch.strided and not t.is_nested and t.device.type != "meta"


def _is_traced(t: Tensor) -> bool:
    """Return whether a tensor stands for another one while a compiler looks at the program."""
    if t.device.type == "meta" or type(t).__name__ in ("FakeTensor", "FunctionalTensor", "ProxyTensor"):
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and type(t).__module__.startswith("torch.")


_NUMBER_INSIDE = re.compile(r"(?<![^.])\d+(?=\.)")
_MADE_BY_COMPILERS = ("GraphModule", "OptimizedModule")
_COMPILED = "_orig_mod."  # what torch.compile puts into a module's path
_NOT_THE_PROGRAM = ("torch.", "tritongemm.workloads.capturing.", "tritongemm.serving.", "runpy.")


class Callers:
    """Finds callers. Names of a model's modules are listed once, and again where one is not among them."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()

    def find(self) -> str:
        """Return the caller of the function that asks: the module that was called last, else the function itself.

        A module is named by its path in the outermost one that has it, where layers of one kind are reported together:
        ``model.layers.*.mlp.up_proj``; the outermost by its class; a function with its module of Python.
        """
        frame: FrameType | None = sys._getframe(1)
        modules, function = list[Module](), ""
        while frame:
            module = _self(frame)
            if module is not None and not (modules and modules[-1] is module):
                modules.append(module)
            name = str(frame.f_globals.get("__name__", ""))
            if not function and not f"{name}.".startswith(_NOT_THE_PROGRAM):
                function = f"{name}.{frame.f_code.co_name}".replace(".<module>", "")
            frame = frame.f_back
        own = [module for module in modules if type(module).__name__ not in _MADE_BY_COMPILERS]
        return self._path(own or modules) if modules else function

    def _path(self, modules: list[Module]) -> str:
        inner = modules[0]
        for outer in reversed(modules[1:]):
            name = self._names.get(outer, {}).get(id(inner))
            if name is None:
                self._names[outer] = {id(module): name for name, module in outer.named_modules()}
                name = self._names[outer].get(id(inner))
            if name:
                return _NUMBER_INSIDE.sub("*", name.replace(_COMPILED, ""))
        return type(inner).__name__


def _self(frame: FrameType) -> Module | None:
    """Return the module whose method a frame runs."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    found = frame.f_locals.get("self")
    is_module = isinstance(found, Module) and not isinstance(found, torch.jit.ScriptModule)
    return found if is_module else None


OWN = "tritongemm."  # what the names of our own calls begin with; they are read, and not run again


class _Watching(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the products among the basic operations that are run under it."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation, self.products, self.seen = operation, list[Product](), False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or PyTorch would import its compiler for it, which takes seconds: `decompose` skips one that is there."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it if it is a product."""
        name = func._schema.name.removeprefix("aten::")
        if name in BASIC:
            self.seen = True
            product = of_aten(self.operation, name, args, kwargs or {})
            self.products += [product] if product else []
        return func(*args, **(kwargs or {}))


def decompose(operation: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Product]:
    """Return the products that a call becomes; none where an operand is empty, or numbers are multiplied singly."""
    if operation.startswith(OWN):
        return of_own(operation, args, kwargs)
    watching = _Watching(operation)
    given = (args, {k: v for k, v in kwargs.items() if k != "out"})
    operands = tree_map_only(Tensor, without_memory, given)
    follow = torch.compiler.disable(_follow) if "torch._dynamo" in sys.modules else _follow
    try:
        follow(watching, function, *operands)
    except Exception as error:  # it went well on the program's own tensors, so that only the watching failed
        if not watching.seen:
            return [of_nothing(operation, f"a call that can't be followed: {type(error).__name__}")]
    return watching.products


def _follow(watching: _Watching, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Run a function while its operations are watched."""
    with torch.no_grad(), watching:
        function(*args, **kwargs)
