"""The short name by which tables call a config."""

from __future__ import annotations

from tritongemm.core.config import Config


def test_short_names() -> None:
    long = Config("_ZN5aiter42bf16gemm_fp32bf16_tn_64x64_splitkE", 64, 64, 64, 1, 3, 0, 0, backend="asm")
    full = Config("tile", 64, 128, 32, 4, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0)))
    assert full.short_name == "tile 64x128x32 gm4 sk2 w4 s3 +2"
    assert Config("tile", 16, 16, 16).short_name == "tile 16x16x16 w4 s2"
    assert long.short_name == "asm._ZN5aiter42..x64_splitkE 64x64x64 sk3"
    assert Config("heuristic", 0, 0, 0, 1, 1, 0, 0, (("index", 7),), "blaslt").short_name == "blaslt.heuristic +1"
