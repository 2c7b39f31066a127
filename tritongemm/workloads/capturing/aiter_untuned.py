"""AITER's file of sizes that it was asked for: ``bf16_untuned_gemm.csv``, which its tuners read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import OutputError
from tritongemm.system.files import atomic_write, check_place, sweep
from tritongemm.system.locks import held
from tritongemm.workloads.capturing.workload_file import ADVICE, Counted, read_lines

if TYPE_CHECKING:  # the command that starts a program has no use for PyTorch
    from tritongemm.workloads.capturing.product import Product

_COLUMNS = ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
_HEADER = ",".join(_COLUMNS)
_MULTIPLIED = ("fp16", "bf16", "fp32")


class AiterUntuned:
    """A file of AITER's that rows are added to; those that are there stay as they are, byte for byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_place(path, lambda start: not start or start.startswith(b"M,N,K"), "a file of AITER's sizes", ADVICE)
        with held(path, ADVICE):
            sweep(path.parent, path.name)
            lines = read_lines(path)
        if lines and lines[0].rstrip() != _HEADER:
            raise OutputError(f"{path} has columns {lines[0].rstrip()[:80]}, not {_HEADER}; {ADVICE}")

    def add(self, counted: Sequence[Counted], with_gradient: bool) -> None:
        """Add the rows that the file lacks: layers of 16 and 32 bits, and of 8 bits with one scale factor a tensor."""
        with held(self.path, ADVICE):
            lines = read_lines(self.path) or [_HEADER + "\n"]
            there = {line.strip() for line in lines}
            new = dict.fromkeys(row for one in counted if (row := _row(one.product)) and row not in there)
            if new:
                atomic_write(self.path, "".join(lines) + "".join(row + "\n" for row in new), ADVICE)


def _row(product: Product) -> str:
    """Return a product's row; "" where AITER has no word for it."""
    p = product
    is_tunable = not p.left_out and p.a.dtype in _MULTIPLIED
    if not p.is_layer or not (is_tunable or p.one_scale) or p.c.dtype not in DTYPES:
        return ""
    dtypes = (f"torch.{DTYPES[name].torch}" for name in (p.a.dtype, p.c.dtype))
    return ",".join(map(str, (p.m, p.n, p.k, p.bias != "none", *dtypes, p.one_scale, False)))
