"""What the libraries' headers say, written down here once more, and the algorithms made with it; no library runs."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.blaslt import types
from tritongemm.hip_ext.blaslt import variants as blaslt_variants
from tritongemm.hip_ext.blaslt.types import Matrix


def test_the_tables_agree_with_the_headers():
    """Fingerprints of cublasLt.h of CUDA 13.1, all 634 tiles and 36 stages."""

    def mark(table):
        return hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()[:16]

    assert (mark(blaslt_tables.tiles()), mark(blaslt_tables.stages())) == ("7a2810358ac8576b", "d878ca7ce9cb92c2")
    assert blaslt_tables.AMD.operations["T"] == 112 and blaslt_tables.NVIDIA.operations["T"] == 1


def test_tiles_that_fill_the_device_come_first(monkeypatch):
    """224 columns make two rounds of 256 tiles on 132 SMs; 256 columns two rounds of longer ones, 128 four."""
    of = {shape: tile for tile, shape in blaslt_tables.tiles().items()}
    capable = {"one": [of[256, 128], of[128, 128], of[224, 128]], "other": [of[224, 128], of[64, 64], 10_000]}
    monkeypatch.setattr(blaslt_variants, "numbers", lambda plan, seed, _: capable[dict(seed.values)["name"]])
    plan = SimpleNamespace(matmul=SimpleNamespace(d=Matrix("bf16", 28672, 256, 28672)))
    seeds = [types.Algorithm(b"", 0, (("name", name), ("tile", 1))) for name in capable]
    found = [(v["name"], blaslt_tables.tiles()[v["tile"]]) for v in blaslt_variants.retiled(plan, seeds, 132)]
    assert found == [
        ("one", (224, 128)),
        ("other", (224, 128)),
        ("one", (256, 128)),
        ("one", (128, 128)),
        ("other", (64, 64)),
    ]
