"""The short name by which tables call a config."""

from __future__ import annotations

import pytest

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError


def test_short_names() -> None:
    long = Config("_ZN5aiter42bf16gemm_fp32bf16_tn_64x64_splitkE", 64, 64, 64, 1, 3, 0, 0, backend="asm")
    full = Config("tile", 64, 128, 32, 4, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0)))
    assert full.short_name == "tile 64x128x32 gm4 sk2 w4 s3 +2"
    assert Config("tile", 16, 16, 16).short_name == "tile 16x16x16 w4 s2"
    assert long.short_name == "asm._ZN5aiter42..x64_splitkE 64x64x64 sk3"
    assert Config("heuristic", 0, 0, 0, 1, 1, 0, 0, (("index", 7),), "blaslt").short_name == "blaslt.heuristic +1"


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_name_with_a_number_too_long_is_none(digits: int) -> None:
    """Beyond 4,300 digits Python refuses to read a number; the message does not repeat them."""
    with pytest.raises(InputError, match="is not a config name") as refused:
        Config.parse(f"tile__bm{'1' * digits}__bn16__bk16__gm1__sk1__w4__s2")
    assert len(str(refused.value)) < 250
    with pytest.raises(InputError, match="is not a config name"):
        Config.parse("tile__bm\u0661__bn16__bk16__gm1__sk1__w4__s2")
    with pytest.raises(InputError, match="is not a config name"):
        Config.parse("tile__bm16__bn16__bk16__gm1__sk1__w4__s2\n")
    longest = Config("tile", 9999999999999999999, 16, 16)
    assert Config.parse(longest.name) == longest
