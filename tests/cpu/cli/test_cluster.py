"""`--ray`: a run from end to end on a stand-in for a cluster, and what of it is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support import fake_ray
from tests.support.cluster_roles import GPU_ROLE, SURVEY_ROLE
from tritongemm.cli import cluster, tune
from tritongemm.measure.cluster import ClusterGpus

pytestmark = pytest.mark.usefixtures("without_gpu")

SIZES = "- {M: 16, N: 16, K: 32}\n- {M: 24, N: 16, K: 32}\n"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> fake_ray.FakeRay:
    monkeypatch.setattr(cluster, "ClusterGpus", partial(ClusterGpus, roles=(GPU_ROLE, SURVEY_ROLE)))
    return fake_ray.put_in_place(monkeypatch, {"head": 0, "one": 1, "two": 1})


def test_a_run_on_a_cluster_ends_in_one_file(
    ray: fake_ray.FakeRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sizes.yaml").write_text(SIZES)
    argv = ["--gemm_size_file", str(tmp_path / "sizes.yaml"), "-o", str(tmp_path / "out.yaml"), "--ray", "auto"]
    argv += ["--budget", "2", "--libtype", "triton", "--num_threads", "1"]
    assert tune.main(argv) == 0
    said = capsys.readouterr().err
    assert "tuning on W7900 x 2 (gfx1100) of a Ray cluster; one: 1, two: 1" in said
    assert ray.held == dict.fromkeys(ray.held, 0)
    rows = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert [row["M"] for row in rows] == [16, 24]
    assert tune.main(argv) == 0
    assert "2 of 2 sizes are in" in capsys.readouterr().err


def test_what_can_not_be_done_on_a_cluster_is_refused(
    ray: fake_ray.FakeRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["-m", "16", "-n", "16", "-k", "32", "-o", str(tmp_path / "out.yaml"), "--ray", "auto"]
    with pytest.raises(SystemExit):
        tune.main([*size, "--gpu_ids", "0"])
    assert "--ngpus says how many of the cluster's are used" in capsys.readouterr().err
    ray.gpus = dict.fromkeys(ray.gpus, 0)
    assert tune.main(size) == 2
    assert capsys.readouterr().err.startswith("error: --ray auto: the cluster has no GPU")
