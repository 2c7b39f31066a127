import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.nouns import Config, Defaults, Launch, Param, SearchLimits, load_target, loader, results_format
from tests.support.refusals import refuses
from tests.support.tables import cases, each
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.results.schema import read_problem
from tritongemm.search import space


def test_short_names_and_numbers() -> None:
    long = Config("_ZN5aiter42bf16gemm_fp32bf16_tn_64x64_splitkE", 64, 64, 64, 1, 3, 0, 0, backend="asm")
    full = Config("tile", 64, 128, 32, 4, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0)))
    assert full.short_name == "tile 64x128x32 gm4 sk2 w4 s3 +2"
    assert Config("tile", 16, 16, 16).short_name == "tile 16x16x16 w4 s2"
    assert long.short_name == "asm._ZN5aiter42..x64_splitkE 64x64x64 sk3"
    assert Config("heuristic", 0, 0, 0, 1, 1, 0, 0, (("index", 7),), "blaslt").short_name == "blaslt.heuristic +1"
    longest = Config("tile", 9999999999999999999, 16, 16)
    assert Config.parse(longest.name) == longest
    # A journal of thousands of sizes names the same configs again and again.
    assert Config.parse(NAME) is Config.parse(NAME) and Config.parse(NAME).name == NAME


NAME = "tile__bm16__bn16__bk16__gm1__sk1__w4__s2"


@cases(
    *("", "tile", "tile__bm16__bn16", "tile__bm16__bn16__bk16__gm1__sk1__w4__s2__Kpack1", "x y"), "x" * 100_000,
    f"{NAME}\n", NAME.replace("bm16", "bm" + "1" * 20), NAME.replace("16", "9" * 5000),
    NAME.replace("16", "\u0661"), f"{NAME}__a",
)  # fmt: skip
def test_what_is_no_name_is_refused_in_a_line(name: str, /) -> None:
    """Python refuses numbers of thousands of digits; `\\d` takes digits of every script."""
    with pytest.raises(InputError, match="is not a config name") as error:
        Config.parse(name)
    assert len(str(error.value)) < 250


GFX942, SM90 = (loader.load_target(name) for name in ("gfx942", "sm90"))
LAUNCH = Launch("k.co", "k", (7, 2, 1), (256, 1, 1), 65536, (Param("i32", 2**31 - 1), Param("u32", 2**32 - 1)), ())


@each(("kind", "value"), [("i32", 2**31), ("i32", 99999999999), ("u32", -1), ("u32", 2**32), ("i64", 2**63)])
def test_a_parameter_fits_its_type(kind: str, value: int) -> None:
    refuses(f"a parameter of type {kind} can't be {value}: it holds ", Param, kind, value)


@cases(
    ({"grid": (2**31, 1, 1)}, "2147483648 workgroups along x, of which a launch has 1 to 2147483647"),
    ({"grid": (1, 65536, 1)}, "65536 workgroups along y, of which a launch has 1 to 65535"),
    ({"grid": (1, 1, 0)}, "0 workgroups along z"),
    ({"block": (512, 4, 1)}, "2048 threads in a workgroup, which has 1 to 1024"),
    ({"block": (0, 1, 1)}, "0 threads in a workgroup"),
    ({"shared": 65537}, "65537 bytes of shared memory, of which a workgroup has 65536"),
    ({"grid": (2**24, 1, 1)}, "4294967296 threads along x, of which a launch has at most 4294967295"),
)
def test_a_launch_is_within_what_the_device_has(change: dict[str, object], fault: str, /) -> None:
    assert LAUNCH.fault(GFX942) == "" and LAUNCH.pack({}) == b"\xff\xff\xff\x7f\xff\xff\xff\xff"
    assert fault in replace(LAUNCH, **change).fault(GFX942)  # type: ignore[arg-type]


def test_threads_of_a_launch_are_counted_and_a_code_object_used_as_compiled(tmp_path: Path) -> None:
    assert replace(LAUNCH, grid=(2**24, 1, 1)).fault(SM90) == ""
    (file := tmp_path / "k.co").write_bytes(b"code")
    launch = replace(LAUNCH, path=str(file), sha256=sha256(b"code").hexdigest())
    assert launch.read_code() == b"code"
    file.write_bytes(b"else")
    refuses(r"k\.co is not the file that was compiled", launch.read_code)


PROBLEM = Problem(64, 512, 1024, *matrices("bf16", layout="TN"))
ENTIRE = space.space(PROBLEM, load_target("sm90"))


def test_limits_narrow_a_space_and_options_that_a_kernel_has_not() -> None:
    """Options that it has not are left out, so that configs do not name them: the kernel's defaults hold."""
    assert SearchLimits().narrow(ENTIRE) == ENTIRE
    assert SearchLimits().allow(Config("asm", 64, 64, 64, split_k=9, backend="asm"))
    limits = SearchLimits(2)
    splits = {split for axes in limits.narrow(ENTIRE).axes for split in dict(axes.values)["split_k"]}
    assert splits <= {1, 2} and len(ENTIRE) > len(limits.narrow(ENTIRE)) > 0
    assert not limits.allow(Config("asm", 64, 64, 64, split_k=3, backend="asm"))
    assert not len(SearchLimits(templates=("no_such",)).narrow(ENTIRE))
    narrow = SearchLimits(1, ("tile",), (("block_k", (32, 64, 128)),), ()).narrow(ENTIRE)
    assert [a.template for a in narrow.axes] == ["tile"]
    configs = list(narrow)
    assert configs and {c.split_k for c in configs} == {1} and {c.block_k for c in configs} == {32, 64, 128}
    assert {c.options for c in configs} == {()}


# Three lines of each: its key, the JSON of a journal, and a row of a file of sizes.
_LINES = Path(__file__).with_name("problems.txt").read_text().splitlines()


@each(("key", "text", "row"), list(zip(*[iter(_LINES)] * 3, strict=True)))
def test_texts_of_a_problem_stay_what_they_are(key: str, text: str, row: str) -> None:
    problem = read_problem(json.loads(text))
    assert problem.key == key and json.dumps(problem.to_json()) == text
    assert [read.problem for read in results_format().read(Path("a.yaml"), f"- {row}\n", Defaults())] == [problem]
