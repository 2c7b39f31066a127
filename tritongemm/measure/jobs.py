"""Messages to the process that measures on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tritongemm.core.config import Config
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.target import Target


@dataclass(frozen=True)
class Request:
    """Work for the GPU's process.

    Attributes:
        kind: ``screen`` (cheap times, one answer each), ``check`` (errors) or ``final`` (errors, then one race of those
            that pass), or ``enumerate`` (one list of the configs `library` has).
        problem, target, protocol, vendor, device: where and how.
        candidates: what to launch; None where the backend is a library that launches by itself.
        library: plug-in of backends/ that races with them, for ``final``, or that is asked, for ``enumerate``.
        most: configs that `enumerate` lists at most; 0 for all.
        best: seconds of the best screened so far; a candidate twice as slow is not measured further.
        watched: the race names whoever runs next, sample by sample.
    """

    kind: str
    problem: Problem
    target: Target
    protocol: MeasureProtocol
    vendor: str
    device: int
    candidates: tuple[tuple[Config, Launch | HostLaunch | None], ...]
    library: str = ""
    most: int = 0
    best: float = math.inf
    watched: bool = False
