"""What works on the hosts of a test's cluster: stand-ins for a GPU's process and for a host's report."""

import time
from collections.abc import Iterator

from tests.support.evaluators import tile_rows_seconds
from tritongemm.core.config import Config
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.hip_ext.machine import Machine
from tritongemm.measure import jobs
from tritongemm.measure.cluster import HostFacts, own_versions
from tritongemm.search_spaces import loader as target_files

GPU_ROLE, SURVEY_ROLE = "tests.support.cluster_roles:StandInGpu", "tests.support.cluster_roles:StandInSurvey"
TRIAL_SECONDS = 0.02
LIBRARY_SECONDS = 40e-6
ROUNDS = 9  # samples of each time


class StandInGpu:
    """Times kernels by their configs, once it has read their code objects; every result is right."""

    def __call__(self, job: jobs.MeasureJob) -> Iterator[jobs.MeasureAnswer]:
        assert job.setup.device == 0, "an actor's GPU is the only one that its processes see"
        yield jobs.OperandsReady(1, True)
        if isinstance(job, jobs.AlgorithmsJob):
            yield jobs.Algorithms(())
            return
        if isinstance(job, jobs.QuantizeJob):
            return
        seconds = {one.config.name: (seconds_of(one.config),) * ROUNDS for one in job.candidates}
        for one in job.candidates:
            time.sleep(TRIAL_SECONDS)
            if one.launch is not None:
                with open(one.launch.path, "rb") as code:
                    assert code.read(4) == b"\x7fELF"
            if isinstance(job, jobs.ScreenJob):
                yield Trial(one.config, "ok", samples=seconds[one.config.name], timer="sundial")
            else:
                yield Trial(one.config, "ok", stage="final", error=0.0, tolerance=0.1)
        if isinstance(job, jobs.RaceJob):
            baseline = {BASELINE_ENTRY: (LIBRARY_SECONDS,) * ROUNDS} if job.baseline else {}
            yield jobs.RaceSamples(seconds | baseline)


def seconds_of(config: Config) -> float:
    """As many microseconds as a tile has rows and one more, and `LIBRARY_SECONDS` of a library's kernel."""
    return tile_rows_seconds(config) if config.block_m else LIBRARY_SECONDS


class StandInSurvey:
    """Reports of a host with one GPU, of the target with the smallest search space."""

    def __call__(self, request: object) -> Iterator[HostFacts]:
        yield HostFacts(Machine(target_files.load_target("gfx1100"), "amd", (0,), "W7900", ""), own_versions())
