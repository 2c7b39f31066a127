import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.call_logs import line
from tests.support.cluster_roles import GPU_ROLE, SURVEY_ROLE
from tests.support.nouns import ArtifactCache, BuildPool, MeasureProtocol, Problem, Trial
from tests.support.stores import take
from tritongemm.build.cluster_pool import ClusterBuildPool
from tritongemm.campaigns.driver import STAGES
from tritongemm.cli import shell
from tritongemm.measure.cluster import ClusterGpus
from tritongemm.report.console import Reporter
from tritongemm.system.ray_hosts import RayHosts
from tritongemm.tune.cluster import Cluster
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun

pytestmark = pytest.mark.heavy  # a cluster takes some seconds to start; tests/cpu/measure/test_cluster.py is quick

# `tritongemm optimize` with stand-ins for what works on the GPUs.
OPTIMIZE = f"""
import sys
from functools import partial
from tritongemm.cli import shell
from tritongemm.tune import cluster
from tritongemm.measure.cluster import ClusterGpus
cluster.ClusterGpus = partial(ClusterGpus, roles={(GPU_ROLE, SURVEY_ROLE)})
sys.exit(shell.run("tritongemm.cli.optimize:main"))
"""
SIZES = [Problem(64 * n, 128, 64) for n in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The head, without a GPU, and two hosts with one each; all on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install tritongemm[ray]")
    from ray.cluster_utils import Cluster as LocalCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=1)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cluster(ray_cluster: Any, said: list[str], tmp_path: Path) -> Iterator[Cluster]:
    hosts = RayHosts(ray_cluster.address)
    try:
        yield Cluster(hosts, ClusterGpus(hosts, None, 0, said.append, (GPU_ROLE, SURVEY_ROLE)))
    finally:
        hosts.close()


def lose_after(trials: int, process: Any, lose: Callable[[], object]) -> threading.Event:
    """Lose a GPU, without a word to Ray, once its process has answered with a number of trials."""
    gone, ask, seen = threading.Event(), process.ask, list[Trial]()

    def asked(request: Any, timeout: float) -> Iterator[Any]:
        for answer in ask(request, timeout):
            yield answer
            seen.extend([answer] * isinstance(answer, Trial))
            if len(seen) == trials and not gone.is_set():
                gone.set()
                lose()

    process.ask = asked
    return gone


@pytest.mark.parametrize(("lost", "remark"), [("actor", "one that was free takes over"), ("host", "does its work too")])
def test_a_gpu_that_is_lost_costs_the_run_nothing_else(
    ray_cluster: Any, cluster: Cluster, said: list[str], tmp_path: Path, lost: str, remark: str
) -> None:
    assert cluster.machine.devices == (0, 1) and "W7900 x 2" in cluster.machine.why
    process = cluster.gpus.processes()[1]
    host = process._gpu.host
    victim = next(node for node in ray_cluster.worker_nodes if node.node_id == host.node)
    gone = lose_after(
        2,
        process,
        lambda: (
            host._ray.kill(host._actor) if lost == "actor" else ray_cluster.remove_node(victim, allow_graceful=False)
        ),
    )
    cache = ArtifactCache(tmp_path / "cache")
    options = TuningOptions(tmp_path, "exhaustive", budget=6, library="", backends=("triton",))
    evaluators = [open_one() for open_one in cluster.openers(MeasureProtocol(), 20.0)]
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(out),
        closing(cluster.pool(cache, 1, 60.0)) as pool,
        take(tmp_path / "out.yaml") as store,
    ):
        assert isinstance(pool, BuildPool) and pool.width > pool.jobs == 1
        failures = TuningRun(evaluators, pool, store, options, Reporter(verbose=True)).tune(SIZES)
        assert failures == {} and gone.is_set(), out.getvalue()
        for size in SIZES:
            record = store.record(size)
            assert record is not None and record.seconds > 0
            trials = store.trials(size)
            assert Counter(stage for _, stage in trials)["screen"] == 6
            assert all(trial.status == "ok" for trial in trials.values())
    assert len(list(cache.folder.glob("*/*"))) > 0
    assert len(said) == 1 and said[0].endswith(remark), said


def test_compilers_on_other_hosts_leave_their_cores_to_the_next_stage(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(2):
        with closing(cluster.pool(ArtifactCache(tmp_path), 1, 60.0)) as pool:
            assert isinstance(pool, ClusterBuildPool) and pool._free.get(timeout=60.0).name


def test_campaigns_go_on_after_a_kill_and_a_lost_host(ray_cluster: Any, tmp_path: Path, session_cache: Path) -> None:
    """At once, while Ray still lists the host; nothing is tried twice, and the GPU that is left does the rest."""
    victim = ray_cluster.add_node(num_cpus=1, num_gpus=1)
    (tmp_path / "job.log").write_text("".join(line(m=16, n=n, k=64, count=n) for n in (16, 32, 48, 64)))
    journal = tmp_path / "tunings" / "tuned.yaml.journal"
    command = [sys.executable, "-c", OPTIMIZE, "job.log", "-o", "tunings", "--ray", ray_cluster.address]
    command += ["--population", "6", "--generations", "2", "--libtype", "triton", "--num_threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe, cwd=tmp_path)

    def trials() -> list[tuple[str, str, str]]:
        text = journal.read_text() if journal.exists() else ""
        entries = [json.loads(one) for one in text[: text.rfind("\n") + 1].splitlines()]
        found = [(json.dumps(e["problem"]), e["trial"]) for e in entries if "trial" in e]
        return [(problem, trial["config"], trial["stage"]) for problem, trial in found]

    killed, limit = start(), time.monotonic() + 120
    while killed.poll() is None and len(trials()) < 8 and time.monotonic() < limit:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    _, reported = killed.communicate(timeout=60)
    assert "tuning on W7900 x " in reported and len(trials()) >= 8, reported
    ray_cluster.remove_node(victim, allow_graceful=False)
    again = start()
    out, reported = again.communicate(timeout=240)
    assert again.returncode == shell.DONE, out + reported
    assert "configs: done already" in reported and "4 of 4 GEMMs kept" in reported
    assert len(trials()) == len(set(trials())) and {stage for _, _, stage in trials()} == {"screen", "final"}
    assert json.loads((tmp_path / "tunings" / "campaign.json").read_text())["done"] == list(STAGES)
