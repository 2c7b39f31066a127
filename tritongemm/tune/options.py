"""The class `TuningOptions`, which has the settings of a tuning run besides its problems."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.space import SearchLimits
from tritongemm.core.target import Target
from tritongemm.measure.choose import MARGIN
from tritongemm.measure.invariance import Invariance


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
        invariance: the reduction order of each product, whose bits are compared; None for any.
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
    invariance: Invariance | None = None

    def limits_of(self, problem: Problem) -> SearchLimits:
        """Return what may be tried of a problem."""
        return replace(self.limits, order=self.invariance.order(problem)) if self.invariance else self.limits

    def may_race(self, config: Config, problem: Problem, target: Target) -> bool:
        """Say whether a config of any origin may race at a problem."""
        return self.invariance is None or self.invariance.allows(config, problem, target)

    def compare(self, problem: Problem, result: RaceResult) -> RaceResult:
        """Return a race without the candidates whose rows' bits are not those of their product."""
        return self.invariance.compare(problem, result) if self.invariance else result
