"""A campaign on this machine's GPUs as those of a Ray cluster's host, each behind an actor that is pinned to it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.call_logs import line
from tritongemm.campaigns.driver import STAGES
from tritongemm.cli import optimize, shell
from tritongemm.hip_ext.machine import Machine, count_devices

LOG = "".join(line(m=1024, n=n, k=2048, count=n) for n in (16, 64, 128, 256))


@pytest.fixture(scope="module")
def ray_cluster(gpu_machine: Machine) -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install tritongemm[ray]")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        cores = len(os.sched_getaffinity(0))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "num_gpus": count_devices()})
        yield cluster
        cluster.shutdown()


def test_a_campaign_on_all_gpus_of_a_cluster(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.log").write_text(LOG)
    words = [str(tmp_path / "job.log"), "-o", str(tmp_path / "tunings"), "--ray", ray_cluster.address]
    assert optimize.main([*words, "--population", "8", "--generations", "2"]) == shell.DONE
    reported = capsys.readouterr().err
    assert f" x {count_devices()} (" in reported and "of a Ray cluster" in reported
    assert sum(one.startswith("device ") and " busy " in one for one in reported.splitlines()) == count_devices()
    assert json.loads((tmp_path / "tunings" / "campaign.json").read_text())["done"] == list(STAGES)
    assert "time-weighted uplift" in reported
