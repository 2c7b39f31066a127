"""The class `HelperKernel`, which is the source text of a kernel that is no GEMM, e.g. one that quantises."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch

ACTIVATIONS = ("silu", "gelu", "clamped_swiglu")  # of a mixture of experts; the last one is gpt-oss's
PARTS = 256  # most values of float32 that one kernel leaves to the next, at an address named part


@dataclass(frozen=True)
class HelperKernel:
    """A kernel that is compiled from a given source text."""

    name: str  # of the function in the text
    source: str = field(repr=False)  # a module of kernels
    # Types of its run-time parameters in order: `*` and a type for a pointer, a type for a number.
    signature: Mapping[str, str] = field(hash=False)
    constants: Mapping[str, float] = field(hash=False)  # values of the other parameters
    # Powers of two of which numeric parameters are multiples.
    divisors: Mapping[str, int] = field(hash=False, default_factory=dict)
    num_warps: int = 4  # warps (NVIDIA) or waves (AMD) of a program
    # It takes OVERLAPS, whether kernels may start before the last one ends, and then waits for that.
    overlaps: bool = False

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the buffers in order: those of their parameters without ``_ptr``."""
        return tuple(name.removesuffix("_ptr") for name, kind in self.signature.items() if kind.startswith("*"))

    def digest(self, arch: str) -> str:
        """Return a hash of everything that a binary for an architecture depends on, except the compiler."""
        facts = {
            "arch": arch,
            "name": self.name,
            "source": self.source,
            "signature": list(self.signature.items()),
            "constants": dict(self.constants),
            "divisors": {name: divisor for name, divisor in self.divisors.items() if divisor > 1},
            "num_warps": self.num_warps,
            "overlaps": self.overlaps,
        }
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        types = [f"{name.removesuffix('_ptr')} {kind}" for name, kind in self.signature.items() if kind[0] == "*"]
        facts = [f"{name} {value:g}" for name, value in {**self.constants, **self.divisors}.items()]
        return f"{self.name} of {', '.join(types)} ({', '.join(facts)})"


@dataclass(frozen=True)
class HelperArguments:
    """The grid of one launch of a helper kernel, programs along x, y, z, and the values of parameters but pointers."""

    grid: tuple[int, int, int]
    numbers: Mapping[str, int] = field(hash=False)

    def given_to(self, launch: Launch, helper: HelperKernel) -> Launch:
        """Return a launch of a helper kernel with this grid and these numbers.

        Raises:
            InputError: the launch has other parameters than the kernel.
        """
        params = list(launch.params)
        found = [(param.kind, param.value if param.kind == "pointer" else "") for param in params]
        wanted = [
            ("pointer", name.removesuffix("_ptr")) if kind.startswith("*") else (kind, "")
            for name, kind in helper.signature.items()
        ]
        if found[: len(wanted)] != wanted:
            raise InputError(f"the launch of {helper.name} has other parameters than the kernel")
        for index, name in enumerate(helper.signature):
            if name in self.numbers:
                params[index] = replace(params[index], value=self.numbers[name])
        return replace(launch, grid=self.grid, params=tuple(params))
