"""Tuned winners → code objects with a manifest, which race as assembly: `python -m tritongemm.export`.

A results file's generated kernels are compiled (or taken from the cache) and written as cubin or hsaco files beside
``kernels.csv``, which says how to launch them (`backends.asm.manifest`). With that file in TRITONGEMM_ASM_MANIFESTS
they race as backend ``asm``, on a machine without Triton too. One size's kernel can compute others: columns ``dtypes``,
``trans``, ``multiple`` and ``small`` (operands of less than 2 GiB) say which. Two kernels of one name go to
``kernels_2.csv`` and so on.
"""

from __future__ import annotations

import csv
import hashlib
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.core import files, settings
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend
from tritongemm.runtime import machine

COLUMNS = (
    "knl_name", "co_name", "tile_m", "tile_n", "subK", "bias", "layout", "grid", "lds", "threads", "split", "group_m",
    "dtypes", "trans", "multiple", "small",
)  # fmt: skip


def export(records: Sequence[Record], folder: Path, here: machine.Machine) -> tuple[list[Path], list[str]]:
    """Write the code objects and manifests of tuned kernels.

    Args:
        records: those for the machine's target whose backend tells its kernels in manifests are taken.
        folder: made where it is missing.
        here: the target, and the compute units its grids are made for.

    Returns:
        The manifests, and why a result was left out.

    Raises:
        InputError: no result can be written.
    """
    mine = [r for r in records if r.target == here.target.name and _has_manifest_rows(r)]
    ready = prepare.prepare_launches(mine, here.target, ArtifactCache(settings.cache_folder()))
    refused, manifests = list[str](), list[dict[str, dict[str, Any]]]()
    folder.mkdir(parents=True, exist_ok=True)
    for record in mine:
        launch = ready[record.problem]
        row = _manifest_row(record, launch, here.target)
        if isinstance(row, Support) or not isinstance(launch, Launch):
            refused.append(f"{record.problem.key}: {record.config.name}: {row}")
            continue
        code = Path(launch.path)
        name = f"{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}{code.suffix}"
        row["co_name"] = name
        held = next((m for m in manifests if m.get(launch.symbol, row) == row), None)
        if held is None:
            manifests.append({launch.symbol: row})
        else:
            held[launch.symbol] = row
        shutil.copyfile(code, folder / name)
    if not manifests:
        raise InputError(
            f"no kernel to export for {here.target.name}: {refused[0] if refused else 'no result is for it'}"
        )
    paths = []
    for index, rows in enumerate(manifests, 1):
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
        paths.append(folder / ("kernels.csv" if index == 1 else f"kernels_{index}.csv"))
        files.atomic_write(paths[-1], out.getvalue())
    return paths, refused


def _has_manifest_rows(record: Record) -> bool:
    backend = registry.get(Backend, record.config.backend)
    return isinstance(backend, KernelBackend) and backend.has_manifest_rows


def _manifest_row(record: Record, launch: Launch | HostLaunch | str, target: Target) -> dict[str, Any] | Support:
    """A record's kernel as a row without its object's name, or why it can't be told."""
    if isinstance(launch, str):
        return Support(launch)
    if isinstance(launch, HostLaunch):
        return Support("its own host code launches it, which a manifest can't describe")
    return registry.get(KernelBackend, record.config.backend).manifest_row(record, launch, target)
