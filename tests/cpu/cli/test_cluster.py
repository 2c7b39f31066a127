"""`--ray`: a run from end to end on a stand-in for a cluster, and what of it is refused."""

import csv
import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support import fake_ray
from tests.support.call_logs import line
from tests.support.cluster_roles import GPU_ROLE, SURVEY_ROLE
from tests.support.nouns import Capsys, Patch, fails
from tritongemm.campaigns.driver import STAGES
from tritongemm.cli import optimize, shell, tune
from tritongemm.measure.cluster import ClusterGpus
from tritongemm.report.page.time_to_quality import quality_over_time
from tritongemm.results import history
from tritongemm.tune import cluster

pytestmark = pytest.mark.usefixtures("without_gpu")

SIZES = "- {M: 16, N: 16, K: 32}\n- {M: 24, N: 16, K: 32}\n"


@pytest.fixture
def ray(monkeypatch: Patch) -> fake_ray.FakeRay:
    monkeypatch.setattr(cluster, "ClusterGpus", partial(ClusterGpus, roles=(GPU_ROLE, SURVEY_ROLE)))
    return fake_ray.put_in_place(monkeypatch, {"head": 0, "one": 1, "two": 1})


def test_a_run_on_a_cluster_ends_in_one_file(ray: fake_ray.FakeRay, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "sizes.yaml").write_text(SIZES)
    argv = ["--gemm_size_file", str(tmp_path / "sizes.yaml"), "-o", str(tmp_path / "out.yaml"), "--ray", "auto"]
    argv += ["--budget", "2", "--libtype", "triton", "--num_threads", "1"]
    assert tune.main(argv) == 0
    said = capsys.readouterr().err
    assert "tuning on W7900 x 2 (gfx1100) of a Ray cluster; one: 1, two: 1" in said
    assert ray.held == dict.fromkeys(ray.held, 0)
    curve = quality_over_time(history.read(tmp_path / "out.yaml.journal"))
    assert f"time to quality: {curve.describe()}" in said, "as in the report"
    assert [row["M"] for row in yaml.safe_load((tmp_path / "out.yaml").read_text())] == [16, 24]
    assert tune.main(argv) == 0
    said = capsys.readouterr().err
    assert "2 of 2 sizes are in" in said and "time to quality" not in said


def test_what_can_not_be_done_on_a_cluster_is_refused(ray: fake_ray.FakeRay, tmp_path: Path, capsys: Capsys) -> None:
    size = ["-m", "16", "-n", "16", "-k", "32", "-o", str(tmp_path / "out.yaml"), "--ray", "auto"]
    fails(SystemExit, "", tune.main, [*size, "--gpu_ids", "0"])
    assert "with --ray, --ngpus says" in capsys.readouterr().err
    ray.gpus = dict.fromkeys(ray.gpus, 0)
    assert tune.main(size) == 2 and capsys.readouterr().err.startswith("error: --ray auto: the cluster has no GPU")


def test_what_campaigns_can_not_do_on_it_is_refused(ray: fake_ray.FakeRay, tmp_path: Path, capsys: Capsys) -> None:
    for words, complaint in ((("--gpus", "0"), "with --ray, --ngpus says"), (("--ngpus", "-1"), "not a whole number")):
        fails(SystemExit, "", optimized, tmp_path, *words)
        assert complaint in capsys.readouterr().err
    assert optimized(tmp_path, "-a", "gfx942") == shell.REFUSED
    assert "the cluster has no GPU of gfx942, but 2 x W7900" in capsys.readouterr().err
    assert not (tmp_path / "tunings").exists()


LOG = line(m=16, n=16, k=32, count=9) + line(m=16, n=24, k=32, count=5)


def optimized(folder: Path, *words: str) -> int:
    (folder / "job.log").write_text(LOG)
    argv = [str(folder / "job.log"), "-o", str(folder / "tunings"), "--ray", "auto", "--libtype", "triton"]
    return optimize.main([*argv, "--population", "3", "--generations", "1", "--num_threads", "1", *words])


def done(folder: Path) -> list[str]:
    return list(json.loads((folder / "tunings" / "campaign.json").read_text())["done"])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.heavy  # the same run without a cluster is quick, and so is a run of sizes on one
def test_a_campaign_measures_all_its_stages_on_a_cluster(ray: fake_ray.FakeRay, tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "tunings"
    assert optimized(tmp_path) == shell.DONE
    said = capsys.readouterr().err
    assert "tuning on W7900 x 2 (gfx1100) of a Ray cluster; one: 1, two: 1" in said
    assert "measuring the baseline of 2 GEMMs on 2 devices" in said and "2 of 2 GEMMs kept" in said
    assert all(f"device {number}: busy" in said for number in (0, 1))
    assert done(tmp_path) == list(STAGES) and ray.held == dict.fromkeys(ray.held, 0)
    assert {row["baseline"] for row in rows(folder / "summary.csv")} == {"measured"}
    measured = rows(folder / "results" / "final_results.csv")
    assert len(measured) == 2 and all(float(row["us_reference"]) == 40 for row in measured)
    assert "--ray auto --ngpus 1" in (folder / "BBS_TN_0.sh").read_text()
    other = tmp_path / "other.yaml"
    warps = {"1": "2", "2": "4", "4": "8", "8": "4"}
    found = (folder / "merged.yaml").read_text()
    other.write_text(re.sub(r'(?<="num_warps": )\d', lambda count: warps[count[0]], found))
    assert optimized(tmp_path, "--only", "merge", "--with", str(other)) == shell.DONE
    assert "raced again" in capsys.readouterr().err
