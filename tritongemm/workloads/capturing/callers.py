"""Who called: the path of a module in its model, or the function where no module is under way."""

import re
import sys
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

_NUMBER_INSIDE = re.compile(r"(?<![^.])\d+(?=\.)")
_MADE_BY_COMPILERS = ("GraphModule", "OptimizedModule")
_COMPILED = "_orig_mod."  # what torch.compile puts into a module's path
_NOT_THE_PROGRAM = ("torch.", "tritongemm.workloads.capturing.", "tritongemm.serving.", "runpy.")


class Callers:
    """Finds callers. Names of a model's modules are listed once, and again where one is not among them."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()

    def find(self) -> str:
        """Return the caller of the function that asks.

        Returns:
            The module that was called last, by its path in the outermost one that has it, where layers of one kind are
            reported together: ``model.layers.*.mlp.up_proj``. The name of its class, where it is the outermost. The
            function with its module of Python, where no module of a model is under way.
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
