"""The class `Config`, which is one point of a search space."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tritongemm.core.errors import InputError

DEFAULT_BACKEND = "triton"  # The backend of a config whose name has none.

# The template comes first so that names sort by kernel; options hold whole numbers only. An exported kernel's own name
# may be a template, so of two tiles in a name the last one counts. No number has more digits than one of 64 bits.
_NUMBER = r"[0-9]{1,19}"
_FIXED = (
    ("block_m", "bm"), ("block_n", "bn"), ("block_k", "bk"), ("group_m", "gm"), ("split_k", "sk"), ("num_warps", "w"),
    ("num_stages", "s"),
)  # fmt: skip
_NAME = re.compile(
    r"(?:(?P<backend>[a-z][a-z0-9_]*)\.)?(?P<template>.+)"
    + "".join(f"__{short}(?P<{name}>{_NUMBER})" for name, short in _FIXED)
    + rf"(?P<options>(?:__[a-z_]+{_NUMBER})*)"
)
LAUNCHED = ("adjacent",)  # options of the launch alone, whatever the template
_LAUNCHED = re.compile(rf"__(?:{'|'.join(LAUNCHED)}){_NUMBER}")
_SHOWN = 100  # characters of a text that a message repeats
_LONGEST_NAME = 4096  # characters; a template may be a library's mangled name of some hundred
_MOST_PARSED = 1 << 14  # configs kept by name; a journal of thousands of sizes names the same few thousand


@dataclass(frozen=True, order=True)
class Config:
    """One way to run a GEMM."""

    template: str  # kernel template (Triton, CK) or kernel name (libraries, assembly)
    # block_m, block_n, block_k: tile
    block_m: int
    block_n: int
    block_k: int
    group_m: int = 1  # tiles along M visited before moving along N, for reuse in L2
    split_k: int = 1  # programs that share one tile's K loop
    num_warps: int = 4  # warps (NVIDIA) or waves (AMD) per program
    num_stages: int = 2  # depth of software pipelining
    options: tuple[tuple[str, int], ...] = ()  # the architecture's own settings, sorted by name, e.g. `(("kpack", 2),)`
    backend: str = DEFAULT_BACKEND  # plug-in of backends/ that builds and launches it

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted((str(k), int(v)) for k, v in self.options)))

    def option(self, name: str, default: int = 0) -> int:
        """Return the value of one of the architecture's own settings."""
        return dict(self.options).get(name, default)

    @property
    def tile(self) -> tuple[int, int, int]:
        """Elements along M, N and K that a workgroup computes at once."""
        return self.block_m, self.block_n, self.block_k

    @property
    def name(self) -> str:
        """Text form; `parse` reads it back. A valid identifier for Triton configs, so it can name the kernel."""
        prefix = "" if self.is_generated else f"{self.backend}."
        fixed = f"{self.template}__bm{self.block_m}__bn{self.block_n}__bk{self.block_k}__gm{self.group_m}"
        fixed += f"__sk{self.split_k}__w{self.num_warps}__s{self.num_stages}"
        return prefix + fixed + "".join(f"__{k}{v}" for k, v in self.options)

    @property
    def kernel_name(self) -> str:
        """The name without arguments of the kernel and options in `LAUNCHED`, which do not change the binary."""
        return _LAUNCHED.sub("", self.name.replace(f"__gm{self.group_m}", "", 1))

    @property
    def is_generated(self) -> bool:
        """Whether its kernel is generated from a template here, named `kernel_name`; otherwise `template` names it."""
        return self.backend == DEFAULT_BACKEND

    @property
    def short_name(self) -> str:
        """The short name in tables, e.g. ``tile 64x128x32 gm4 sk2 w4 s3 +2``; `name` has all of it.

        Long templates are shortened, a group or split of one is omitted; the last word is the number of options.
        """
        prefix = "" if self.is_generated else f"{self.backend}."
        template = self.template if len(self.template) <= 24 else f"{self.template[:11]}..{self.template[-11:]}"
        words = [prefix + template]
        words += ["x".join(map(str, self.tile))] if any(self.tile) else []
        words += [f"gm{self.group_m}"] if self.group_m > 1 else []
        words += [f"sk{self.split_k}"] if self.split_k > 1 else []
        words += [f"w{self.num_warps}"] if self.num_warps else []
        words += [f"s{self.num_stages}"] if self.num_stages else []
        words += [f"+{len(self.options)}"] if self.options else []
        return " ".join(words)

    @classmethod
    def parse(cls, name: str) -> Config:
        """Return the config with this name. Raises InputError: not a config name."""
        return _parse(name)


@lru_cache(maxsize=_MOST_PARSED)
def _parse(name: str) -> Config:
    """Parse a name, without the cache of `Config.parse`."""
    match = _NAME.fullmatch(name) if len(name) <= _LONGEST_NAME else None
    if not match:
        shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"
        raise InputError(f"{shown} is not a config name, e.g. tile__bm64__bn64__bk32__gm8__sk1__w4__s2")
    fields = match.groupdict()
    options = re.findall(r"__([a-z_]+?)([0-9]+)(?=__|$)", fields.pop("options"))
    backend, template = fields.pop("backend") or DEFAULT_BACKEND, fields.pop("template")
    numbers = {k: int(v) for k, v in fields.items()}
    return Config(template=template, options=tuple((k, int(v)) for k, v in options), backend=backend, **numbers)


AXES = ("block_m", "block_n", "block_k", "group_m", "split_k", "num_warps", "num_stages")
BLOCKS = AXES[:3]
