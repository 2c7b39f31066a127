import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import emulated
from tests.support.nouns import Capsys, Config, InputError, Launch, Machine, Patch, Record, each, load_target, registry
from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.cli import export, launch_plan
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.export import kernel_manifest
from tritongemm.hip_ext import machine
from tritongemm.plugins.contracts import KernelBackend
from tritongemm.results.store import Store
from tritongemm.system import settings

ASM = registry.get(KernelBackend, "asm")
TILE = Config("tile", 16, 32, 32, 4, 2, 2, 2)
TMA = Config("tma", 16, 32, 32, num_warps=1)
STREAM = Config("stream_k", 16, 16, 32, num_warps=1, options=(("num_sms", 8),))
SIZE = Problem(20, 48, 160, *matrices("bf16", layout="TN"))
SM90 = Machine(load_target("sm90"), "", (), "H200", "")


def record(problem: Problem, config: Config = TILE, arch: str = "sm90") -> Record:
    return Record(
        problem, arch, config, "triton", 2e-6, 0.01, "events", toolchain={"triton": settings.version("triton")}
    )


def test_winners_race_as_assembly(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """The same launch, for the size they were tuned for and others whose remainders are alike."""
    half = replace(SIZE, a=SIZE.a._replace(dtype="fp16"), b=SIZE.b._replace(dtype="fp16"), c=Operand("fp16"))
    records = [record(SIZE), record(half), record(SIZE, TMA), record(SIZE, STREAM), record(SIZE, arch="gfx942")]
    results = tmp_path / "tuned.yaml"
    sized = [replace(r, problem=replace(r.problem, m=20 + i)) for i, r in enumerate(records)]
    with Store.open(results, "sm90", {}, {}) as store:
        for one in sized[:4]:
            store.add_record(one)
        store.merge()
    monkeypatch.setattr(machine, "find_machine", lambda _: SM90)
    assert export.main([str(results), "-o", str(tmp_path / "out")]) == 0
    paths = sorted((tmp_path / "out").glob("*.csv"))
    assert [p.name for p in paths] == ["kernels.csv", "kernels_2.csv"]
    (tmp_path / "file").write_text("no folder")
    assert export.main([str(results), "-o", str(tmp_path / "file")]) == 2
    assert "file can't be written: File exists; choose another folder" in capsys.readouterr().err
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", ":".join(map(str, paths)))
    for one in sized[:2]:
        (config,) = ASM.candidates(one.problem, SM90.target)
        assert (config.tile, config.group_m, config.split_k) == (TILE.tile, 4, 2)
        built, code, _ = ASM.compile(ASM.compile_job(config, one.problem, SM90.target))
        launch = ASM.launch(replace(built, path="x"), one.problem, SM90.target)
        expected = prepare.prepare_launches([one], SM90.target, ArtifactCache(settings.cache_folder()))[one.problem]
        assert isinstance(expected, Launch) and Path(expected.path).read_bytes() == code
        for field in ("symbol", "grid", "block", "shared", "buffers"):
            assert getattr(launch, field) == getattr(expected, field), field
        addresses = {"a": 1, "b": 2, "c": 0, "workspace": 4, "semaphore": 5}
        assert isinstance(launch, Launch)
        mine, theirs = launch.pack(addresses), expected.pack(addresses)
        assert mine[: len(theirs)] == theirs
    assert ASM.candidates(replace(SIZE, m=999, k=320), SM90.target), "M may be anything, K a multiple of the step"
    assert not ASM.candidates(replace(SIZE, k=168), SM90.target)


def test_sizes_share_what_the_compiler_assumed(tmp_path: Path, monkeypatch: Patch) -> None:
    """A kernel whose rows start at multiples of 16 bytes must not get rows that do not."""
    tuned = replace(SIZE, n=40, k=168)
    (path,), _ = kernel_manifest.export([record(tuned)], tmp_path, SM90)
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(path))
    assert ASM.candidates(replace(tuned, n=72, k=24), SM90.target)
    for other in (replace(tuned, n=44), replace(tuned, k=164)):
        assert "must be multiples as in 1/8/8" in ASM.has_candidates(other, SM90.target).reason


def test_offsets_reach_what_the_compiler_assumed(tmp_path: Path, monkeypatch: Patch) -> None:
    """Buffer instructions of AMD have offsets of 32 bits: a kernel for small operands must not get large ones."""
    gfx942 = Machine(load_target("gfx942"), "", (), "MI300X", "")
    (path,), _ = kernel_manifest.export([record(SIZE, arch="gfx942")], tmp_path, gfx942)
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(path))
    assert ASM.candidates(replace(SIZE, m=2**21), gfx942.target)
    for large, what in (
        (replace(SIZE, m=2**23), "a and workspace must"),
        (replace(SIZE, m=2**21, n=512), "c and workspace must"),
    ):
        assert f"{what} be less than 2 GiB" in ASM.has_candidates(large, gfx942.target).reason


@each("order", [1, -1])
def test_of_two_results_of_one_size_the_devices_own_is_exported(tmp_path: Path, order: int) -> None:
    """A row states the tile of the very kernel that it launches."""
    own = replace(record(SIZE), compute_units=132)
    other = replace(record(SIZE, replace(TILE, block_m=32)), compute_units=114)
    (path,), left_out = kernel_manifest.export([own, other][::order], tmp_path, SM90)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert (row["tile_m"], row["knl_name"]) == ("16", TILE.kernel_name)
    assert left_out == [(other, "the result of 132 compute units is taken")]


def test_what_no_manifest_can_describe(capsys: Capsys, tmp_path: Path) -> None:
    bias = replace(SIZE, bias="m")
    wide = replace(SIZE, m=128, n=128, k=128)
    records = [record(SIZE), record(bias), record(wide, TMA), record(replace(wide, m=64), STREAM)]
    paths, refused = kernel_manifest.export([*records, record(bias, arch="")], tmp_path, SM90)
    assert len(paths) == 1 and len(refused) == 4
    reasons = [reason for _, reason in refused]
    assert "bias along M" in reasons[0] and "tensor maps" in reasons[1] and "template stream_k" in reasons[2]
    assert reasons[3] == "it is a result without a target, not for sm90"
    with pytest.raises(InputError, match="no result is for it; there are some for gfx942: name one by --target"):
        kernel_manifest.export([record(SIZE, arch="gfx942")], tmp_path, SM90)
    (tmp_path / "sizes.yaml").write_text("- {M: 1, N: 1, K: 1}\n")
    assert export.main([str(tmp_path / "sizes.yaml"), "-o", str(tmp_path / "none")]) == 2
    assert "no kernel to export" in capsys.readouterr().err and not (tmp_path / "none").exists()
    assert ASM.available() or "TRITONGEMM_ASM_MANIFESTS" in ASM.available().reason


def test_predicted_winners_and_other_backends_are_reported(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    results = tmp_path / "tuned.yaml"
    algorithm = Config("heuristic", 0, 0, 0, options=(("algo", 1),), backend="blaslt")
    with Store.open(results, "sm90", {}, {}) as store:
        store.add_record(replace(record(SIZE), timer="model"))
        store.add_record(replace(record(replace(SIZE, m=21), algorithm), winner="blaslt"))
        store.merge()
    monkeypatch.setattr(machine, "find_machine", lambda _: SM90)
    assert export.main([str(results), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "1 of 1 kernels are fast by prediction alone: no GPU has timed or verified them" in said
    assert "21x48x160_bf16_TN: a manifest can't describe kernels of blaslt" in said


GFX942 = "grouped__bm16__bn32__bk64__gm2__sk1__w2__s2__matrix_instr_nonkdim16__per_unit1__xcds8"
GFX950 = "grouped__bm32__bn64__bk128__gm1__sk1__w4__s2__matrix_instr_nonkdim16__per_unit1"
SERVED = "grouped_tile__bm16__bn32__bk64__gm4__sk1__w2__s2__kpack1__matrix_instr_nonkdim16__waves_per_eu0"
# The first four have each form of groups, target, kernel and kind of scales once.
PLANS = (
    ("gfx942", GFX942, ["-dtype_a", "bf16"]),
    ("gfx942", GFX942, ["--family", "a8w8", "--group_form", "masked", "--room", "35", "-n", "40"]),
    ("gfx950", GFX950, ["--family", "a4w4_blockscale", "-k", "330", "--group_form", "masked", "--room", "35"]),
    ("gfx942", SERVED, ["--family", "a8w8_blockscale", "-k", "256"]),
    ("gfx942", GFX942, ["--family", "a8w8_blockscale", "-k", "256"]),
    ("gfx950", GFX950, ["--family", "a8w8_blockscale", "-k", "256", "--group_form", "masked", "--room", "33"]),
    ("gfx942", GFX942, ["--family", "a8w8", "-dtype_a", "int8", "-n", "45"]),
    ("gfx950", GFX950, ["--family", "a8w8_blockscale", "-dtype_a", "int8", "-k", "256"]),
    ("gfx950", SERVED, ["-dtype_a", "bf16", "--group_form", "masked", "--room", "33"]),
    ("gfx942", GFX942, ["--family", "a8w8_blockscale", "-k", "250", "-n", "139"]),
    ("gfx950", GFX950, ["--family", "a8w8_blockscale", "--scales", "group", "-k", "250", "-n", "13"]),
)


def write(folder: Path, arch: str, config: str, more: list[str]) -> Path:
    size = {"-m": "41", "-n": "72", "-k": "88"} | dict(zip(more[::2], more[1::2], strict=True))
    argv = [word for pair in size.items() for word in pair]
    argv += ["-col_b", "--groups", "5", "--spread", "7,0,33,1,0", "--target", arch, "--config", config]
    assert launch_plan.main([*argv, "--num-threads", "1", "-o", str(folder)]) == 0
    return folder / "plan_0.json"


@pytest.mark.parametrize(
    ("arch", "config", "more"),
    [pytest.param(*plan, marks=() if place in (0, 3) else pytest.mark.heavy) for place, plan in enumerate(PLANS[:4])],
)
def test_a_plan_has_its_groups(tmp_path: Path, arch: str, config: str, more: list[str]) -> None:
    plan = json.loads(write(tmp_path, arch, config, more).read_text())
    about = {b["name"]: b for b in plan["buffers"]}
    name, numbers = ("counts", [7, 0, 33, 1, 0]) if "masked" in more else ("offsets", [7, 7, 40, 41, 41])
    assert (about[name]["init"], about[name]["values"], about[name]["dtype"]) == ("values", numbers, "i32")
    size = dict(zip(more[::2], more[1::2], strict=True))
    assert about["b"]["shape"] == [5, int(size.get("-k", 88)), int(size.get("-n", 72))]


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "config", "more"), PLANS)
def test_every_product_is_right_on_an_emulator(tmp_path: Path, arch: str, config: str, more: list[str]) -> None:
    emulated.run_scaled(tmp_path, write(tmp_path / "plans", arch, config, more))
