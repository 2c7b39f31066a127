"""Tuned winners → code objects with a manifest, which race as assembly: `tritongemm export`.

A results file's generated kernels are compiled (or taken from the cache) and written as cubin or hsaco files beside
``kernels.csv``, which says how to launch them (`backends.asm.manifest`). With that file in TRITONGEMM_ASM_MANIFESTS
they race as backend ``asm``, on a machine without Triton too. One size's kernel can compute others: columns ``dtypes``,
``trans``, ``multiple`` and ``small`` (operands of less than 2 GiB) say which. Two kernels of one name go to
``kernels_2.csv`` and so on.
"""

import csv
import hashlib
import io
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend
from tritongemm.system import files, settings

COLUMNS = (
    "knl_name", "co_name", "tile_m", "tile_n", "subK", "bias", "layout", "grid", "lds", "threads", "split", "group_m",
    "dtypes", "trans", "multiple", "small",
)  # fmt: skip


def export(
    records: Sequence[Record], folder: Path, here: machine.Machine
) -> tuple[list[Path], list[tuple[Record, str]]]:
    """Write tuned kernels' code objects and manifests; return the manifests, and why other results were left out."""
    mine, left_out = _choose(records, here.target)
    ready = prepare.prepare_launches(mine, here.target, ArtifactCache(settings.cache_folder()))
    manifests = list[dict[str, dict[str, Any]]]()
    codes, refused = dict[str, Path](), list[tuple[Record, str]]()
    for record in mine:
        launch = ready[record.problem]
        row = _manifest_row(record, launch, here.target)
        if isinstance(row, Support) or not isinstance(launch, Launch):
            refused.append((record, f"{record.config.name}: {row}"))
            continue
        code = Path(launch.path)
        name = f"{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}{code.suffix}"
        row["co_name"] = name
        held = next((m for m in manifests if m.get(launch.symbol, row) == row), None)
        if held is None:
            manifests.append({launch.symbol: row})
        else:
            held[launch.symbol] = row
        codes[name] = code
    if not manifests:
        own = [(record, reason) for record, reason in refused + left_out if record.target == here.target.name]
        why = f"{own[0][0].problem.key}: {own[0][1]}" if own else _describe_others(left_out)
        raise InputError(f"no kernel to export for {here.target.name}: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in codes.items():
        shutil.copyfile(code, folder / name)
    paths = [folder / ("kernels.csv" if n == 1 else f"kernels_{n}.csv") for n in range(1, len(manifests) + 1)]
    for path, rows in zip(paths, manifests, strict=True):
        _write_manifest(path, rows.values())
    return paths, refused + left_out


def _write_manifest(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a manifest with one of these rows."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.atomic_write(path, out.getvalue())


def _describe_others(left_out: Sequence[tuple[Record, str]]) -> str:
    """Return a message that no result is for the target, and which targets have some."""
    others = ", ".join(sorted({record.target for record, _ in left_out if record.target}))
    return "no result is for it" + (f"; there are some for {others}: name one by --target" if others else "")


def _choose(records: Sequence[Record], target: Target) -> tuple[list[Record], list[tuple[Record, str]]]:
    """Return the records to export, one for each size, and those that are left out with the reason.

    Of two for one size the one of as many compute units as the target's counts, or else the later one.
    """
    chosen: dict[Problem, Record] = {}
    left_out = []
    for record in records:
        backend = registry.get(Backend, record.config.backend)
        if not (isinstance(backend, KernelBackend) and backend.has_manifest_rows):
            left_out.append((record, f"a manifest can't describe kernels of {record.config.backend}"))
            continue
        if record.target != target.name:
            named = f"for {record.target}" if record.target else "without a target"
            left_out.append((record, f"it is a result {named}, not for {target.name}"))
            continue
        other = chosen.setdefault(record.problem, record)
        if other is not record:
            kept, given_up = (other, record) if other.compute_units == target.compute_units else (record, other)
            chosen[record.problem] = kept
            left_out.append((given_up, f"the result of {kept.compute_units} compute units is taken"))
    return list(chosen.values()), left_out


def _manifest_row(record: Record, launch: Launch | HostLaunch | str, target: Target) -> dict[str, Any] | Support:
    """Return a record's kernel as a row without its object's name, or why a manifest can't have it."""
    if isinstance(launch, str):
        return Support(launch)
    if isinstance(launch, HostLaunch):
        return Support("its own host code launches it, which a manifest can't describe")
    return registry.get(KernelBackend, record.config.backend).manifest_row(record, launch, target)
