import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.nouns import Backend, Capsys, Family, KernelBackend, Patch, Problem, Record, registry, results_format
from tests.support.nouns import loader as target_files
from tests.support.plugins import dropped, show_to_children
from tritongemm.cli import export, launch_plan, tune
from tritongemm.core.trial import PREDICTED

pytestmark = pytest.mark.usefixtures("without_gpu")

BACKEND, FAMILY = "working_backend_toy", "family_toy"
GFX942 = target_files.load_target("gfx942")


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugins")
    context = pytest.MonkeyPatch.context()
    with context as patch, dropped(Backend, BACKEND, folder, patch), dropped(Family, FAMILY, folder, patch):
        show_to_children(folder, patch, Backend, Family)
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))


def test_its_kernel_is_launch_planned_and_exported(tmp_path: Path) -> None:
    size, place = ["-m", "33", "-n", "48", "-k", "64"], ["--target", "gfx942", "-o"]
    assert launch_plan.main([*size, "--backend", BACKEND, *place, str(tmp_path / "plan")]) == 0
    plan = json.loads((tmp_path / "plan" / "plan_0.json").read_text())
    assert (plan["arch"], plan["problem"]["M"], plan["grid"][0]) == ("gfx942", 33, 9)
    assert (tmp_path / "plan" / plan["object"]).read_bytes().startswith(b"\x7fELF")

    problem = Problem(33, 48, 64)
    (config,) = registry.get(KernelBackend, BACKEND).candidates(problem, GFX942)
    record = Record(problem, "gfx942", config, BACKEND, 1e-6, 0.0, "events")
    (tmp_path / "tuned.yaml").write_text(results_format().write([record]))
    assert export.main([str(tmp_path / "tuned.yaml"), *place, str(tmp_path / "exported")]) == 0
    (row,) = csv.DictReader((tmp_path / "exported" / "kernels.csv").read_text().splitlines())
    assert (row["tile_m"], row["tile_n"]) == ("16", "16")
    assert (tmp_path / "exported" / row["co_name"]).read_bytes() == (tmp_path / "plan" / plan["object"]).read_bytes()


def test_it_is_compiled_with_the_others(tmp_path: Path) -> None:
    """tests/gpu races and serves it."""
    size = ["-m", "33", "-n", "48", "-k", "64", "--target", "gfx942", "--budget", "2", "--num_threads", "1"]
    out = ["-o", str(tmp_path / "out.yaml"), "--compile_only"]
    assert tune.main([*size, "--libtype", f"triton,{BACKEND}", *out]) == 0
    compiled = {json.loads(path.read_text())["facts"]["config"] for path in (tmp_path / "cache").rglob("*.json")}
    assert any(BACKEND in name for name in compiled) and any(BACKEND not in name for name in compiled)


def test_a_family_with_its_own_scales_is_tuned_and_verified(tmp_path: Path, capsys: Capsys) -> None:
    """int8 weights with a scale per column: types, inputs, reference and tolerance are the family's."""
    size = ["-m", "33", "-n", "48", "-k", "64", "--target", "gfx942", "--budget", "2", "--num_threads", "1"]
    assert tune.main([*size, "--family", FAMILY, "--libtype", "triton", "-o", str(tmp_path / "out.yaml")]) == 0
    assert "are predictions, and serve no call: they are of products that no call computes" in capsys.readouterr().err
    (row,) = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert (row["family"], row["dtype_a"], row["dtype_b"], row["dtype_c"]) == (FAMILY, "fp16", "int8", "fp16")
    assert row["timer"] == PREDICTED and 0 < row["error"] <= row["tolerance"] and "interpreter" in row["verified"]
