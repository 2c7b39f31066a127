"""What the libraries' headers say, written down here once more, and the algorithms made with it; no library runs."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.blaslt import variants as blaslt_variants
from tritongemm.hip_ext.blaslt.tables import Matrix


def test_the_tables_agree_with_the_headers() -> None:
    """Fingerprints of cublasLt.h of CUDA 13.1, all 634 tiles and 36 stages."""

    def mark(table: dict[int, tuple[int, int]]) -> str:
        return hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()[:16]

    assert (mark(blaslt_tables.tiles()), mark(blaslt_tables.stages())) == ("7a2810358ac8576b", "d878ca7ce9cb92c2")
    assert blaslt_tables.AMD.operations["T"] == 112 and blaslt_tables.NVIDIA.operations["T"] == 1


def test_tiles_that_fill_the_device_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """224 columns make two rounds of 256 tiles on 132 SMs; 256 columns two rounds of longer ones, 128 four."""
    of = {shape: tile for tile, shape in blaslt_tables.tiles().items()}
    capable = {1: [of[256, 128], of[128, 128], of[224, 128]], 2: [of[224, 128], of[64, 64], 10_000]}
    monkeypatch.setattr(blaslt_variants, "read_capability_list", lambda _, seed, __: capable[dict(seed.values)["algo"]])
    prepared: Any = SimpleNamespace(matmul=SimpleNamespace(d=Matrix("bf16", 28672, 256, 28672)))
    seeds = [blaslt_tables.Algorithm(b"", 0, (("algo", number), ("tile", 1))) for number in capable]
    found = [(v["algo"], blaslt_tables.tiles()[v["tile"]]) for v in blaslt_variants.vary_tile(prepared, seeds, 132)]
    assert found == [(1, (224, 128)), (2, (224, 128)), (1, (256, 128)), (1, (128, 128)), (2, (64, 64))]
