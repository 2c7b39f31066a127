"""The class `TuningOptions`, which has the settings of a tuning run besides its problems."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tritongemm.core.problem import Problem
from tritongemm.core.space import SearchLimits
from tritongemm.measure.choose import MARGIN


@dataclass(frozen=True)
class TuningOptions:
    """The settings of a run beside the problems.

    Attributes:
        folder: where generated modules go.
        strategy: plug-in of strategies/.
        budget: most configs tried for one problem; 0 for no limit.
        population: configs of a generation, of a strategy that has generations; 0 for its own number.
        budgets: the same of problems that have one of their own.
        seconds: after so long no strategy is asked for more, and what there is is raced; 0 for no limit.
        finalists: candidates verified and raced.
        library: plug-in of backends/ that is raced; "" for none.
        backends: plug-ins of backends/ whose candidates are tried.
        algorithms: most candidates screened of each library, 0 for all; the library's own best guesses come first.
        margin: relative gain below which the library is kept.
        stop: "" to tune, or the stage after which to stop: ``generate`` or ``compile``.
        toolchain: versions, for the records.
        limits: what of the search spaces may be tried.
    """

    folder: Path
    strategy: str = "exhaustive"
    budget: int = 0
    population: int = 0
    budgets: Mapping[Problem, int] = field(default_factory=dict, hash=False)
    seconds: float = 0.0
    finalists: int = 12
    library: str = "torch"
    backends: tuple[str, ...] = ("triton",)
    algorithms: int = 48
    margin: float = MARGIN
    stop: str = ""
    toolchain: dict[str, str] = field(default_factory=dict, hash=False)
    limits: SearchLimits = field(default_factory=SearchLimits)
