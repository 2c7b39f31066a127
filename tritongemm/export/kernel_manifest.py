"""The command line of `python -m tritongemm.export`: tuned winners → code objects with a manifest, to race as assembly.

A results file's Triton kernels are compiled (or taken from the cache) and written as cubin or hsaco files beside
``kernels.csv``, which says how to launch them (`tritongemm.manifest`). With that file in TRITONGEMM_ASM_MANIFESTS they race
as backend ``asm``, on a machine without Triton too. One size's kernel can compute others: columns ``dtypes``, ``trans``,
``multiple`` and ``small`` (operands of less than 2 GiB) say which. Two kernels of one name go to ``kernels_2.csv`` and so on.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritongemm.backends.triton.backend import divisors, small
from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.codegen import template_facts
from tritongemm.core import files, settings
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.runtime import machine

COLUMNS = (
    "knl_name", "co_name", "tile_m", "tile_n", "subK", "bias", "layout", "grid", "lds", "threads", "split", "group_m",
    "dtypes", "trans", "multiple", "small",
)  # fmt: skip
_TILES = template_facts.kernel_template("tile").grid
_SIZES = ("m", "n", "k", "lda", "ldb", "ldc", "group_m")


def export(records: Sequence[Record], folder: Path, here: machine.Machine) -> tuple[list[Path], list[str]]:
    """Write the code objects and manifests of tuned kernels.

    Args:
        records: those of Triton's for the machine's target are taken.
        folder: made where it is missing.
        here: the target, and the compute units its grids are made for.

    Returns:
        The manifests, and why a result was left out.

    Raises:
        InputError: no result can be written.
    """
    mine = [r for r in records if r.target == here.target.name and r.config.backend == "triton"]
    ready = prepare.launches(mine, here.target, ArtifactCache(settings.cache_folder()))
    refused, manifests = list[str](), list[dict[str, dict[str, Any]]]()
    folder.mkdir(parents=True, exist_ok=True)
    for record in mine:
        found = ready[record.problem]
        reason = found if isinstance(found, str) else _misfit(record, found)
        if reason or not isinstance(found, Launch):
            refused.append(f"{record.problem.key}: {record.config.name}: {reason or found}")
            continue
        code = Path(found.path)
        name = f"{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}{code.suffix}"
        row = _row(record, found, name, here.target)
        held = next((m for m in manifests if m.get(found.symbol, row) == row), None)
        if held is None:
            manifests.append({found.symbol: row})
        else:
            held[found.symbol] = row
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


def _misfit(record: Record, launch: Any) -> str | None:
    """Why a launch can't be told in a manifest, or None."""
    if isinstance(launch, HostLaunch) or any(p.kind == "tma" for p in launch.params):
        return "it takes tensor maps, which a manifest can't describe"
    if record.problem.bias == "m":
        return "a bias along M, which manifests have no word for"
    if template_facts.kernel_template(record.config.template).grid != _TILES or launch.cluster > 1:
        return f"the grid of template {record.config.template} is not its tiles and splits"
    return None


def _row(record: Record, launch: Launch, name: str, target: Target) -> dict[str, Any]:
    problem, config = record.problem, record.config
    order = [*template_facts.operands(problem), *_SIZES]
    order += ["null"] * (len(launch.params) - len(order))  # Triton's own scratch
    # What the compiler was told of the sizes holds for every size the kernel may compute.
    known = divisors(problem)
    depth = math.lcm(known.get("K", 1), config.block_k if problem.k % config.block_k == 0 else 1)
    return {
        "knl_name": launch.symbol,
        "co_name": name,
        "tile_m": config.block_m,
        "tile_n": config.block_n,
        "subK": config.block_k,
        "bias": int(problem.bias == "n"),
        "layout": " ".join(order),
        "grid": "mn,k",
        "lds": launch.shared,
        "threads": launch.block[0],
        "split": config.split_k,
        "group_m": config.group_m,
        "dtypes": problem.dtypes,
        "trans": problem.layout,
        "multiple": f"{known.get('M', 1)}/{known.get('N', 1)}/{depth}",
        "small": " ".join(p.removesuffix("_ptr") for p in small(config, problem, target)),
    }
