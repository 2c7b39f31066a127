from pathlib import Path
from typing import Any

import pytest

from tests.support.nouns import Patch, Problem, Target, TargetError, apart, cases
from tritongemm.cli import tune
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.driver import driver
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun

SIZE = ("-m", "16", "-n", "16", "-k", "16")


class FakeDevice:
    def __init__(self, ordinal: int = 0) -> None:
        self.arch, self.name = "sm90", "NVIDIA H200"
        self.properties = {"compute_units": 120, "lds_bytes": 1000, "memory_bytes": 2**37, "l2_bytes": 12345}

    def device_count(self) -> int:
        return 2

    device = __init__


@cases(("sm90", "sm90 (H100)"), ("H200", "sm90 (H200)"), ("MI300A", "gfx942 (MI300A, with the figures of MI300X)"))
def test_without_a_gpu_the_machine_is_what_was_asked_for(wanted: str, named: str, /, monkeypatch: Patch) -> None:
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    assert machine.find_machine(wanted).why == f"no GPU here: compiling for {named}"


@pytest.fixture
def two_gpus(monkeypatch: Patch) -> None:
    fake = FakeDevice()
    monkeypatch.setattr(driver, "find_vendor", lambda: "nvidia")
    monkeypatch.setattr(driver, "open_driver", lambda _: fake)
    monkeypatch.setattr(fake, "device", lambda _: fake, raising=False)


def test_the_machine_corrects_the_target(two_gpus: None) -> None:
    here = machine.find_machine(None)
    target: Target = here.target
    assert (here.devices, here.vendor, target.name, target.product) == ((0,), "nvidia", "sm90", "H200")
    assert (target.compute_units, target.l2_bytes, target.llc_bytes) == (120, 12345, 12345)
    assert machine.find_machine(None, "1,0").devices == (1, 0) and machine.find_machine(None, ngpus=2).devices == (0, 1)
    assert machine.toolchain(here)["device"] == "NVIDIA H200"
    away = machine.find_machine("H100")
    assert (away.devices, away.target.product) == ((0,), "H200")
    away = machine.find_machine("gfx950")
    assert away.devices == () and "without running" in away.why and "device" not in machine.toolchain(away)


ON_THE_GPU, ELSEWHERE = "--profiler events", "--target gfx942"


@apart(
    (ON_THE_GPU, "guided", 0, 0.0),
    (f"{ON_THE_GPU} --budget 7", "guided", 7, 0.0),
    (f"{ON_THE_GPU} --budget 1.5s", "guided", 0, 1.5),
    (f"{ON_THE_GPU} --strategy guided --generate_only", "guided", 0, 0.0),
    (f"{ON_THE_GPU} --compile_only", "exhaustive", 64, 0.0),
    (ELSEWHERE, "exhaustive", 64, 0.0),
    (f"{ELSEWHERE} --budget 0", "exhaustive", 0, 0.0),
    (f"{ELSEWHERE} --budget 90s", "exhaustive", 0, 90.0),
    (f"{ELSEWHERE} --strategy exhaustive", "exhaustive", 0, 0.0),
    (f"{ELSEWHERE} --generate_only", "exhaustive", 0, 0.0),
)
def test_what_is_tried(
    words: str, strategy: str, budget: int, seconds: float, /, two_gpus: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A guided search where something is timed; else the best predicted, of which a user may have more or all."""
    plans: list[TuningOptions] = []

    def noted(self: Any, *_: object) -> dict[Problem, str]:
        plans.append(self.options)
        return {}

    monkeypatch.setattr(TuningRun, "tune", noted)
    argv = [*SIZE, "--libtype", "triton", "--num_threads", "1", "-o", str(tmp_path / "out.yaml"), *words.split()]
    assert tune.main(argv) == 0
    assert [(p.strategy, p.budget, p.seconds) for p in plans] == [(strategy, budget, seconds)]


def test_devices_of_two_kinds(two_gpus: None, monkeypatch: Patch) -> None:
    devices = [FakeDevice(), FakeDevice()]
    devices[1].name = "NVIDIA A100"
    monkeypatch.setattr(driver.open_driver("nvidia"), "device", devices.__getitem__)
    assert machine.find_machine(None, "1").product == "NVIDIA A100"
    with pytest.raises(TargetError, match=r"devices 0, 1 are not alike \(NVIDIA H200 of 120 .* and NVIDIA A100 of 120"):
        machine.find_machine(None, ngpus=2)
    devices[1].name = devices[0].name
    assert machine.find_machine(None, ngpus=2).devices == (0, 1)
    devices[1].properties = {**devices[0].properties, "compute_units": 60}  # a part of the chip
    with pytest.raises(TargetError, match=r"NVIDIA H200 of 120 compute units and NVIDIA H200 of 60 compute units"):
        machine.find_machine(None, ngpus=2)


@pytest.mark.parametrize(("ids", "count"), [("2", 0), ("0,0", 0), ("-1", 0), ("a", 0), (None, 3)])
def test_devices_that_are_not_there(two_gpus: None, ids: str | None, count: int) -> None:
    with pytest.raises(TargetError, match=r"this machine has 0 to 1|whole numbers with commas between, not 'a'"):
        machine.find_machine(None, ids, count)
