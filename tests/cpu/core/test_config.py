"""The short name by which tables call a config, and its complete name, which is read back."""

import pytest

from tests.support.tables import each
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError


def test_short_names() -> None:
    long = Config("_ZN5aiter42bf16gemm_fp32bf16_tn_64x64_splitkE", 64, 64, 64, 1, 3, 0, 0, backend="asm")
    full = Config("tile", 64, 128, 32, 4, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0)))
    assert full.short_name == "tile 64x128x32 gm4 sk2 w4 s3 +2"
    assert Config("tile", 16, 16, 16).short_name == "tile 16x16x16 w4 s2"
    assert long.short_name == "asm._ZN5aiter42..x64_splitkE 64x64x64 sk3"
    assert Config("heuristic", 0, 0, 0, 1, 1, 0, 0, (("index", 7),), "blaslt").short_name == "blaslt.heuristic +1"


NAME = "tile__bm16__bn16__bk16__gm1__sk1__w4__s2"


@each(
    "name",
    [
        "",
        "x" * 100_000,
        f"{NAME}\n",
        NAME.replace("bm16", "bm" + "1" * 20),
        NAME.replace("16", "9" * 5000),
        NAME.replace("16", "\u0661"),
        f"{NAME}__a",
    ],
)
def test_what_is_no_name_is_refused_in_a_line(name: str) -> None:
    """Python refuses numbers of thousands of digits; `\\d` takes digits of every script."""
    with pytest.raises(InputError, match="is not a config name") as error:
        Config.parse(name)
    assert len(str(error.value)) < 250


def test_the_longest_number_is_read() -> None:
    longest = Config("tile", 9999999999999999999, 16, 16)
    assert Config.parse(longest.name) == longest


def test_a_name_is_read_once() -> None:
    """A journal of thousands of sizes names the same configs again and again."""
    assert Config.parse(NAME) is Config.parse(NAME) and Config.parse(NAME).name == NAME
