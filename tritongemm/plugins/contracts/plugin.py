"""The base class of all kinds of plug-ins."""

from abc import ABC
from collections.abc import Iterator
from typing import Any, ClassVar

from tritongemm.core.support import SUPPORTED, Support


class Plugin(ABC):  # noqa: B024 (kinds have the abstract methods)
    """The attributes and methods that every plug-in has."""

    package: ClassVar[str] = ""  # the package that contains plug-ins of this kind
    kind: ClassVar[str] = ""  # the kind's name in messages
    name: str = ""  # the file's name; the registry sets it
    aliases: ClassVar[tuple[str, ...]] = ()  # other names that a command line or a file may use

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Refuse a plug-in that leaves something out: a TypeError names the missing methods and attributes."""
        super().__init_subclass__(**more)
        if abstract:
            return
        members = {name: getattr(cls, name, None) for name in dir(cls)}
        missing = [name for name, member in members.items() if getattr(member, "__isabstractmethod__", False)]
        missing += [name for name in _declared(cls) if name not in members]
        if missing:
            where = f"{cls.__module__}.{cls.__qualname__}"
            raise TypeError(
                f"{where} is no {cls.kind} plug-in yet: it lacks {', '.join(sorted(missing))} (docs/plugins)"
            )

    def available(self) -> Support:
        """Say whether this machine has what the plug-in needs."""
        return SUPPORTED


def _declared(cls: type) -> Iterator[str]:
    """Yield the names of the class variables that bases declare without a value: a plug-in must give them one."""
    for base in cls.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if "ClassVar" in str(annotation) and not any(name in vars(b) for b in cls.__mro__):
                yield name
