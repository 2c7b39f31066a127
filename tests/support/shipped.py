"""Small shipped tables that stand in for the package's: of two GPUs, which differ in their memory alone."""

from collections.abc import Sequence
from pathlib import Path

from scripts.tables import packing
from scripts.tables.products import Product
from tests.support.formats import write_text
from tests.support.linear_layers import TILE, problem, record
from tests.support.nouns import Config, Patch, Record
from tritongemm.serving import shipped_tables

OTHER = Config("tile", 32, 32, 64, num_warps=4, num_stages=3)
ALGORITHM = Config("nameless", 64, 64, 0, backend="blaslt")
N, K = 96, 64
LAYER = "Toy 1B, TP 1: qkv_proj"


GPUS = (("NVIDIA H100 80GB HBM3", 3352), ("NVIDIA H200", 4917))


def rows(device: str) -> list[Record]:
    """A table up to M 96: a kernel up to 16, in three rows, another up to 32, the library to 64, an algorithm to 96."""
    tools = {"device": device, "triton": "3.5.1", "torch": "2.11.0"}
    same = {"compute_units": 132, "toolchain": tools, "code": "5" * 64}
    ends = ((1, 1), (2, 8), (9, 16), (17, 32), (33, 48), (49, 64), (65, 96))
    tiles = (TILE, TILE, TILE, OTHER, TILE, OTHER, ALGORITHM)
    winners = ("triton", "triton", "triton", "triton", "torch", "torch", "blaslt")
    return [
        record(problem(high, N, K), config, winner=winner, m_from=low, held_out={str(high - 1): [0.01, 1.1]}, **same)
        for (low, high), config, winner in zip(ends, tiles, winners, strict=True)
    ]


def ship(folder: Path, monkeypatch: Patch, gpus: Sequence[tuple[str, int]] = GPUS, most: int = 7) -> list[str]:
    """Put tables of GPUs, of their first rows, in the place of the package's; return what packing them says."""
    monkeypatch.setattr(shipped_tables, "FOLDER", folder / "shipped")
    said = []
    products = [Product(problem(1, N, K), 64, (LAYER,))]
    for device, gbps in gpus:
        made = folder / f"{gbps}.yaml"
        head = f'# made: {{"date": "2026-01-02", "driver": "580.1", "memory_gbps": {gbps}}}\n'
        made.write_text(head + write_text(*rows(device)[:most]), encoding="utf-8")
        said.append(packing.pack(made, products, shipped_tables.FOLDER))
    return said
