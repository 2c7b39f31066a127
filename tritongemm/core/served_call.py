"""The classes of a call at run time: its signature, its resolution, a loaded kernel and a patched launch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record

INVARIANT = "invariant"  # the kind of a resolution to an untuned kernel whose rows do not depend on M


@dataclass(frozen=True)
class LaunchSteps:
    """The driver's calls of a launch in order, for compiled code that makes them without Python."""

    steps: Sequence[Any]  # prepared calls, whose `described` is what the compiled code takes
    slots: Mapping[str, Sequence[tuple[int, int, int]]]  # by operand: a step, an offset there, what is added


@dataclass(frozen=True)
class PatchedLaunch:
    """A launch at addresses that are still to be given; belongs to one thread."""

    # What takes the address of `a`, `b`, `c`, `bias`, `workspace` or `semaphore`; one that is missing is not used.
    setters: Mapping[str, Callable[[int], None]]
    launch: Callable[[int], None]  # queues it on the stream of a handle
    steps: LaunchSteps | None = None  # the same for compiled code; None where Python must take part

    def set_address(self, name: str) -> Callable[[int], None]:
        """Return the setter of the address of one buffer."""
        return self.setters.get(name, lambda address: None)


class LoadedKernel(Protocol):
    """A kernel or a library's algorithm that is loaded on a device."""

    def bytes(self, buffer: str) -> int:
        """Return the bytes of a buffer that the runtime owns: ``workspace`` or ``semaphore``."""

    def prepare(self, device: Any) -> PatchedLaunch:
        """Return a launch for one thread; `device` is the driver's (`hip_ext.driver.driver.Device`)."""


@dataclass(frozen=True)
class CallSignature:
    """The request of a call at run time."""

    problem: Problem  # x [M, K] @ w [N, K].T (+ bias [N]), whose B is w.T
    precision: str = "fp32"  # how float32 is multiplied, `fp32` or `tf32`; `fp32` for other types
    vector: bool = False  # x has one dimension, which is another operation to PyTorch
    frequent: bool = True  # the size has been called many times, so that looking for a better kernel pays
    invariant: bool = False  # a row of the result must have the same bits at every M


@dataclass(frozen=True)
class Resolution:
    """The kernel that serves a call, or why PyTorch does."""

    # `exact` (the tuned kernel), `range` (the one of the range of M that the call is in), `bucket` (the one of AITER's
    # padded M), `near` (that of another M, for a product that PyTorch has no fast call of), `invariant` (an untuned
    # kernel in the order of all M), `library` (it won the tuning) or `fallback` (PyTorch).
    kind: str
    text: str  # which kernel, and why
    kernel: LoadedKernel | None = None  # what is launched; None where PyTorch is called
    lasting: bool = True  # whether an equal call will be resolved alike until other records are loaded
    record: Record | None = None  # the tuned record that the answer follows from; None where there is none
    where: str = ""  # the file and the row of that record

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
