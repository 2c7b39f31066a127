"""Launch plans of grouped products, and where an emulator is at hand, what their kernels compute."""

import json
from pathlib import Path

import pytest

from tests.support import emulated
from tritongemm.cli import launch_plan

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
