"""The final race on one device, in which candidates and the baseline are sampled in rounds of random order."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.hip_ext.driver import driver
from tritongemm.measure import choose
from tritongemm.measure.jobs import NowRacing, RaceSamples
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets, PreparedCandidate
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Clock, Timer

GRAPH_SECONDS = 4e-4  # seconds that one replay of an entry's graph takes at least, at the roofline
LIMIT_SECONDS = 0.4  # seconds after which a race ends, once every entry has run `FEWEST_ROUNDS` times
FEWEST_ROUNDS = 10
BRIEF_ROUNDS = 7  # the same of a brief race: fewer can show no entry to be faster than another
ROUNDS_PER_DECISION = 5  # rounds between two tests of whether the race is decided; a test takes as long as a round
SOAK_SECONDS = 0.025  # seconds for which an entry runs before each of its samples at sustained power
HEATING_ROUNDS = 5  # rounds of that without samples: a power limit follows in a second
MOST_TIMES_AS_MANY_ROUNDS = 4  # how many times the protocol's rounds an undecided race may take


@dataclass
class RaceEntry:
    """A participant of a race, the baseline without a config; samples are seconds of one launch, one for each round."""

    config: Config | None
    graph: driver.Graph
    launches: int
    prepared: PreparedCandidate
    samples: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its samples."""
        return self.config.name if self.config else BASELINE_ENTRY

    def soak(self, clock: Clock, seconds: float) -> None:
        """Run without pause until the clock is that of a long job of this entry, a launch of which takes `seconds`."""
        for _ in range(math.ceil(SOAK_SECONDS / (seconds * self.launches))):
            self.time(clock)

    def time(self, clock: Clock) -> float:
        """Take a sample: seconds of one launch. Raises EntryFailed: it can't be launched any more."""
        try:
            return clock.time(self.graph, self.launches, self.prepared.symbol)
        except (RuntimeError, DriverError) as error:
            raise EntryFailed(self.config, error) from error


class EntryFailed(Exception):
    """An entry failed during the race."""

    def __init__(self, config: Config | None, error: Exception) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


def graph_launches(operands: OperandSets) -> int:
    """Return the number of launches in an entry's graph."""
    return operands.launches_for(GRAPH_SECONDS, OperandSets.MAX_COPIES)


def run_race(
    operands: OperandSets, entries: Sequence[RaceEntry], names_runners: bool, brief: bool = False
) -> Iterator[NowRacing | RaceSamples]:
    """Warm the entries up, sample them in rounds until the race is decided, and yield the samples last.

    Rounds are in random orders, so that drift of clocks and temperature affects all entries alike. Each entry is named
    when it warms up, and with `names_runners` before each sample, so that one that hangs is identified. The baseline,
    if there is one, is the last. A brief race ends after the fewest rounds; clearly slower entries then leave after
    two. An entry that can't be launched any more raises `EntryFailed`. At sustained power each runs for a while before
    its samples; those after rests are taken in a few rounds before.
    """
    protocol, clock = operands.protocol, operands.race_clock
    order = random.Random(protocol.seed)
    counts_gaps = registry.get(Timer, protocol.timer).counts_gaps
    lead_in = LeadInKernel(operands.sets[0]["a"].device) if counts_gaps else None
    for entry in entries:
        yield NowRacing(entry.name)
        for _ in range(max(1, math.ceil(protocol.warmup / entry.launches))):
            entry.time(clock)
    yield NowRacing("")
    rounds = max(FEWEST_ROUNDS, math.ceil(protocol.iters / max((e.launches for e in entries), default=1)))
    fewest = BRIEF_ROUNDS if brief else FEWEST_ROUNDS
    rested = _heat(entries, clock, order) if operands.sustained else {}
    running, deadline = list(entries), time.perf_counter() + LIMIT_SECONDS
    for done in range(1, MOST_TIMES_AS_MANY_ROUNDS * rounds + 1):
        for entry in order.sample(running, len(running)):
            if names_runners:
                yield NowRacing(entry.name)
            if lead_in:
                lead_in()
            if operands.sustained:
                entry.soak(clock, rested[entry.name][-1])
            entry.samples.append(entry.time(clock))
            operands.rest(entry.samples[-1] * entry.launches)
        staying, decided = _after_round(done, running, brief)
        # Of a GPU whose clock still falls, one that left early would have the faster rounds.
        running = running if operands.sustained else staying
        if done >= fewest and (brief or (decided and done >= rounds) or time.perf_counter() > deadline):
            break
    yield RaceSamples({e.name: e.samples for e in entries}, rested)


def _heat(entries: Sequence[RaceEntry], clock: Clock, order: random.Random) -> dict[str, list[float]]:
    """Take samples after rests, then work until the power limit holds the GPU's clock; return the samples by name."""
    rested: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for _ in range(BRIEF_ROUNDS):
        for entry in order.sample(entries, len(entries)):
            rested[entry.name].append(entry.time(clock))
            time.sleep(rested[entry.name][-1] * entry.launches)
    for entry in [*entries] * HEATING_ROUNDS:
        entry.soak(clock, rested[entry.name][-1])
    return rested


def _after_round(done: int, running: list[RaceEntry], brief: bool) -> tuple[list[RaceEntry], bool]:
    """Return the entries that stay in the race after a number of rounds, and whether it is decided.

    Tests take as long as a round: they are made every few rounds, and not at all in a brief race.
    """
    if done != 2 and (brief or done % ROUNDS_PER_DECISION):
        return running, False
    samples = {e.name: e.samples for e in running}
    staying = choose.not_clearly_slower(samples) if brief else choose.still_racing(samples)
    left = {name: taken for name, taken in samples.items() if name in staying}
    decided = not brief and (len(left) < 2 or choose.decided(left))
    return [e for e in running if e.name in staying], decided
