"""Transitional: backends that are modules still, seen as classes."""

from __future__ import annotations

from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.plugins import _modules, registry
from tritongemm.plugins.contracts import Backend, Capabilities, KernelBackend, LibraryBackend


def get_backend(name: str) -> Backend:
    try:
        return registry.get(Backend, name)
    except InputError:
        module = _modules.load("backends", name)
    base: Any = LibraryBackend if module.launch.__annotations__["return"] == "None" else KernelBackend
    members: dict[str, Any] = {n: lambda *_: None for n in base.__abstractmethods__}
    members |= {"summary": "", "capabilities": Capabilities(), "baseline": base is LibraryBackend}
    if hasattr(module, "resolve"):
        from tritongemm.backends.blaslt import served_algorithm, torch_choice

        members |= {"baseline": False, "load": lambda self, *a: served_algorithm.load_tuned(*a)}
        members |= {"default_kernel": lambda self, *a: torch_choice.load_torch_default(*a)}
    backend: Backend = type(f"Module{name}", (base,), members)()
    backend.name = name
    return backend
