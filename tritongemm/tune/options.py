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
    """The settings of a run beside the problems."""

    folder: Path  # where generated modules go
    strategy: str = "exhaustive"  # plug-in of strategies/
    budget: int = 0  # most configs tried for one problem; 0 for no limit
    population: int = 0  # configs of a generation, of a strategy that has generations; 0 for its own number
    # The same of problems that have one of their own.
    budgets: Mapping[Problem, int] = field(default_factory=dict, hash=False)
    seconds: float = 0.0  # after so long no strategy is asked for more, and what there is is raced; 0 for no limit
    finalists: int = 12  # candidates verified and raced
    library: str = "torch"  # plug-in of backends/ that is raced; "" for none
    backends: tuple[str, ...] = ("triton",)  # plug-ins of backends/ whose candidates are tried
    # Most candidates screened of each library, 0 for all; the library's own best guesses come first.
    algorithms: int = 48
    margin: float = MARGIN  # relative gain below which the library is kept
    stop: str = ""  # "" to tune, or the stage after which to stop: `generate` or `compile`
    toolchain: dict[str, str] = field(default_factory=dict, hash=False)  # versions, for the records
    limits: SearchLimits = field(default_factory=SearchLimits)  # what of the search spaces may be tried
    invariance: Invariance | None = None  # the reduction order of each product, whose bits are compared; None for any

    def limits_of(self, problem: Problem) -> SearchLimits:
        """Return what may be tried of a problem."""
        return replace(self.limits, order=self.invariance.order(problem)) if self.invariance else self.limits

    def may_race(self, config: Config, problem: Problem, target: Target) -> bool:
        """Say whether a config of any origin may race at a problem."""
        return self.invariance is None or self.invariance.allows(config, problem, target)

    def compare(self, problem: Problem, result: RaceResult) -> RaceResult:
        """Return a race without the candidates whose rows' bits are not those of their product."""
        return self.invariance.compare(problem, result) if self.invariance else result
