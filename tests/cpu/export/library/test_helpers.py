import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import libraries, raising, stored_calls
from tests.support.linear_layers import stand_in_device
from tests.support.nouns import Capsys, Config, Machine, Patch, loader, refuses
from tests.support.products import product
from tests.support.tables import apart
from tritongemm.build import expert_kernels, few_expert_kernels, helpers
from tritongemm.build.cache import ArtifactCache
from tritongemm.cli import library as command
from tritongemm.core.errors import UnavailableError
from tritongemm.export.library import building
from tritongemm.export.library.storage import MANIFEST, manifest_text, open_library
from tritongemm.search_spaces import schema
from tritongemm.serving.device_kernels import HelperKernels
from tritongemm.system import settings
from tritongemm.workloads import sizes

SM90 = loader.load_target("sm90")
HERE = Machine(SM90, "", (), "", "")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: Patch) -> Path:
    stored_calls.write(tmp_path / "library", monkeypatch)
    return tmp_path / "library"


def test_what_is_beside_the_products_is_read_as_it_was_written(library: Path, tmp_path: Path) -> None:
    found = open_library(library)
    assert found.targets == {"sm90": SM90} and not found.damaged and not found.faults()
    problems = [entry.record.problem for entry in found.entries]
    wanted = {h.digest("sm90") for p in problems for h, _ in building._wanted(libraries.tuned(p), SM90)}
    assert {asked for _, asked in found.helpers} == wanted and len(wanted) > 20
    assert command.main(["merge", str(library), "-o", str(tmp_path / "merged.zip")]) == 0
    merged = open_library(tmp_path / "merged.zip")
    assert merged.digest == found.digest and not merged.faults()
    strides = {e.record.problem.batch: e.kernel.strides for e in merged.entries if e.kernel is not None}
    assert strides[1] is None and strides[3] is not None and strides[3].places["stride_a"][1] == 8


def test_facts_of_an_earlier_version_are_read(library: Path, monkeypatch: Patch) -> None:
    """The first libraries had assembly among them."""
    now = schema.target_facts(SM90)
    monkeypatch.setattr(schema, "target_facts", lambda target: {**now, "overlap": {}, "narrow": {"x": "y"}})
    text = manifest_text((), (), [SM90])
    (library / MANIFEST).write_text(text, encoding="utf-8")
    found = open_library(library)
    assert "overlap" in text and found.targets == {"sm90": SM90} and not found.damaged


@apart(
    ('"name":"sort_rows"', '"name":"sort_row"', "kernel [0-9]+ beside the products"),
    ('"lds_bytes":', '"lds_bytes":1', "the facts of sm90"),
    ('"most_lead":1048576', '"most_lead":1048577', "8x32x64_bf16_TN_batch3 on sm90"),
)
def test_an_edited_part_is_refused_by_name(old: str, new: str, name: str, /, library: Path) -> None:
    text = (library / MANIFEST).read_text(encoding="utf-8")
    assert old in text
    (library / MANIFEST).write_text(text.replace(old, new, 1), encoding="utf-8")
    (damaged,) = open_library(library).damaged
    assert re.match(name, damaged.name) and "changed after it was written" in damaged.reason


def test_missing_code_wrong_manifests_and_other_launches_are_refused(library: Path, capsys: Capsys) -> None:
    helper, given = expert_kernels.choose_sort("i32", 5, 4)
    other = next(h for h in open_library(library).helpers.values() if h.kernel == "combine_rows")
    refuses("other parameters than the kernel", given.given_to, other.launch, helper)
    gone = next(helper for helper in open_library(library).helpers.values() if helper.kernel == "combine_rows")
    (library / gone.member).unlink()
    (damaged,) = open_library(library).damaged
    assert damaged.name == gone.name and damaged.reason.endswith("is missing")
    assert command.main(["verify", str(library)]) == 1
    assert f"damaged: {library}: {gone.name}" in capsys.readouterr().err
    data = json.loads((library / MANIFEST).read_text(encoding="utf-8"))
    (library / MANIFEST).write_text(json.dumps({**data, "helpers": 7}), encoding="utf-8")
    refuses("lists of entries and helpers and a map of targets; build it again", open_library, library)


def test_facts_come_from_a_library_or_are_asked_for_by_name(library: Path, monkeypatch: Patch) -> None:
    found = open_library(library)
    own = replace(found, targets={"sm90": replace(SM90, fp8="none")})
    assert HelperKernels(stand_in_device(), (found, own)).target.fp8 == "none", "the latest counts"
    assert HelperKernels(stand_in_device()).target == SM90
    monkeypatch.setitem(sys.modules, "tritongemm.search_spaces.loader", None)
    monkeypatch.delattr("tritongemm.search_spaces.loader", raising=False)
    with pytest.raises(UnavailableError, match="no library that is loaded has the facts of sm90"):
        _ = HelperKernels(stand_in_device()).target


def test_what_no_library_can_hold_is_reported(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    blocks = product("a8w8_blockscale", 16, 256, 512, "fp8e4m3fn")
    package = Config("gemm", 0, 0, 0, options=(("overlap", 1),), backend="deepgemm")
    monkeypatch.setattr(helpers, "compile_helpers", raising(UnavailableError("no compiler here")))
    built = building.build([replace(libraries.tuned(blocks, winner="deepgemm"), config=package)], HERE)
    reported = dict(built.compiled_late)
    assert len(built.entries) == 1 and "own package compiles" in reported.pop(built.entries[0].name)
    assert reported and all(name.startswith("quantize_groups of x *bf16") for name in reported)
    monkeypatch.setattr(building, "build", lambda *given: built)
    monkeypatch.setattr(sizes, "from_results", lambda *given: SimpleNamespace(rows=(), damaged=()))
    assert command.main(["build", "tuned.yaml", "-o", str(tmp_path / "out.zip")]) == 0
    said = capsys.readouterr().err
    assert said.count("not held: ") == len(built.compiled_late) and "no compiler here; where nothing" in said


@pytest.mark.heavy
@pytest.mark.parametrize(("arch", "fp8"), [("sm90", "fp8e4m3fn"), ("gfx942", "fp8e4m3fnuz")])
@pytest.mark.usefixtures("session_cache")
def test_kernels_of_experts_compile_ahead_of_time(arch: str, fp8: str) -> None:
    target = loader.load_target(arch)
    chosen = [
        expert_kernels.choose_sort("i64", 14, 8),
        expert_kernels.choose_route("i64", "bf16", fp8, "block", (14, 256), 256, 2, 8),
        expert_kernels.choose_activate("bf16", fp8, "row", 14, 200, "gelu"),
        expert_kernels.choose_gather("bf16", "int8", "row", 14, 200, 200, 2),
        expert_kernels.choose_activate("fp16", "int8", "row", 14, 384, "silu"),
        expert_kernels.choose_combine("bf16", "fp32", 7, 256, 8, 3),
        expert_kernels.choose_gather("bf16", "fp4e2m1", "mx_shuffled", 14, 2048, 2048, 2),
    ]
    for dtype, mode in (("bf16", ""), ("int8", "row"), (fp8, "block")):
        one = few_expert_kernels.FewExperts("i32", "bf16", dtype, mode, 14, 384, 256, 2, 8)
        chosen.append(few_expert_kernels.choose_gate_up(one, 256, "silu"))
        chosen.append(few_expert_kernels.choose_down(one, "fp32"))
    if arch == "sm90":
        chosen.append(expert_kernels.choose_activate("bf16", fp8, "mx", 14, 200, "silu"))
    built = helpers.compile_helpers([helper for helper, _ in chosen], target, ArtifactCache(settings.cache_folder()))
    for (helper, given), artifact in zip(chosen, built, strict=True):
        launch = helpers.launch_helper(artifact, helper, given, target)
        assert [p.value for p in launch.params[: len(helper.pointers)]] == list(helper.pointers)
        assert launch.grid == given.grid and artifact.spills == 0 and launch.read_code()
        assert given.given_to(replace(launch, grid=(1, 1, 1)), helper) == launch


def test_binaries_do_not_depend_on_how_many_rows_there_are() -> None:
    def digests(rows: int, experts: int) -> list[str]:
        chosen = [
            expert_kernels.choose_sort("i32", 2000 + rows, experts),
            expert_kernels.choose_gather("bf16", "bf16", "", rows, 4096, 4096, experts),
            expert_kernels.choose_activate("bf16", "bf16", "", rows, 4096, "silu"),
            expert_kernels.choose_combine("bf16", "fp32", rows, 4096, experts, 5 + rows % 4),
        ]
        return [helper.digest("sm90") for helper, _ in chosen]

    assert digests(7, 8) == digests(1000, 256) and len({*digests(7, 8)}) == 4
