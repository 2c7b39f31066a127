import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.support.nouns import BASELINE_ENTRY, Config, MeasureProtocol, Patch
from tritongemm.measure import race
from tritongemm.measure.jobs import RaceSamples

COLD, HOT, WARM_UP_S = 1e-4, 2e-4, 0.02  # seconds of a launch, and of work after which it takes the longer


@dataclass
class HeatingGpu:
    sustained: bool
    protocol: MeasureProtocol = field(default_factory=MeasureProtocol)
    busy_s: float = 0.0

    @property
    def race_clock(self) -> "HeatingGpu":
        return self

    def time(self, graph: object, launches: int, symbol: str) -> float:
        seconds = HOT if self.busy_s >= WARM_UP_S else COLD
        self.busy_s += seconds * launches
        return seconds

    def rest(self, busy_s: float) -> None:
        self.busy_s = self.busy_s if self.sustained else 0.0

    def sleep(self, seconds: float) -> None:
        self.busy_s = 0.0


@pytest.mark.parametrize("sustained", [False, True])
def test_a_race_at_sustained_power_states_the_times_after_rests_too(sustained: bool, monkeypatch: Patch) -> None:
    gpu = HeatingGpu(sustained)
    monkeypatch.setattr(time, "sleep", gpu.sleep)
    monkeypatch.setattr(race, "LeadInKernel", lambda device: lambda: None)
    gpu_sets = cast(Any, gpu)
    gpu_sets.sets = [{"a": cast(Any, type("Tensor", (), {"device": "cpu"}))}]
    prepared = cast(Any, type("Prepared", (), {"symbol": ""}))
    config = Config("tile", 16, 16, 16)
    entries = [race.RaceEntry(one, cast(Any, None), 4, prepared) for one in (config, None)]
    *_, found = race.run_race(gpu_sets, entries, names_runners=False, brief=True)
    assert isinstance(found, RaceSamples) and found.samples.keys() == {config.name, BASELINE_ENTRY}
    assert {s for taken in found.samples.values() for s in taken[2:]} == {HOT if sustained else COLD}
    assert {s for taken in found.rested.values() for s in taken} == ({COLD} if sustained else set())
