"""Converts rows of AITER's CSVs of fused mixtures of experts to and from their two products: gate and up, then down.

A row is of a layer: ``token`` tokens, each of which goes to ``topk`` of ``expert`` experts. Its products are of
groups whose rows are those of all tokens' experts: N is ``inter_dim``, twice that where gate and up are joined
(``use_g1u1``), and K ``model_dim``; then the other way round. What stands between the products, the activation and the
quantisation of its result, is in no time here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, Translation
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.formats import _aiter_merge as merging
from tritongemm.formats import _aiter_rows
from tritongemm.formats._aiter_families import DEVICE, CsvFamily
from tritongemm.formats._aiter_table import CsvLine, CsvTable
from tritongemm.formats._rows import KeptError, make_problem
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, WeightLayout

# Our family and its scales ("" for the first that it has), by the last word of ``q_type``; of fp8 by powers of two.
_FAMILIES = {
    "No": ("dense", ""),
    "per_Token": ("a8w8", ""),
    "per_Tensor": ("a8w8", ""),  # AITER too repeats an expert's one factor for each row
    "per_1x128": ("a8w8_blockscale", ""),
    "per_128x128": ("a8w8_blockscale", ""),
    "per_1x32": ("a4w4_blockscale", ""),
}
_FP8_BY_POWERS = ("a8w8_blockscale", "mx_shuffled")
# The same of weights of four bits with factors for each 1 x 32, by the type of A.
_OF_FOUR_BITS = {
    ("torch.float8_e4m3fn", "torch.float4_e2m1fn_x2"): ("a8w4", "mx"),
    (_aiter_rows.A_DTYPE, "torch.float4_e2m1fn_x2"): ("a16w4", "weight_mx"),
    (_aiter_rows.A_DTYPE, "torch.int4"): ("a16w4", "weight_32"),
}
_RESULTS = (
    *("block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage"),
    *("tflops", "bw"),
)
_STAGES = ("1", "2")
_ANY = "-1"  # AITER's word for any topk


def read_line(line: CsvLine, where: str, defaults: Defaults) -> tuple[FormatRow, ...]:
    """Return the two products of a row."""
    if line.cells is None:
        raise InputError(f"{where} {line.fault}")
    cells, (target, units) = _aiter_rows.Cells(line.cells, where), _aiter_rows.device(line.cells)
    given = Defaults(fp8_encoding=_aiter_rows.encoding_of(target, defaults), families=defaults.families)
    found = []
    for stage, problem in zip(_STAGES, _problems(cells, given), strict=True):
        config = (
            _aiter_rows.own_config(cells.text(f"kernelName{stage}"))
            if target and not target.startswith(_aiter_rows.TARGETS)
            else None
        )
        if config is not None:
            problem = _as_read(problem, config, target)
        us = cells.text(f"us{stage}")
        record = None if config is None else _aiter_rows.read_record(us, problem, config, target, units)
        places = line.number, line.row, target, units
        found.append(FormatRow(problem, config, record, *places, subject=line.cells, optional=True))
    return tuple(found)


def _as_read(problem: Problem, config: Config, target: str) -> Problem:
    """Return a problem with its weight of four bits in the order that a kernel reads, which the columns do not say."""
    from tritongemm.search_spaces.loader import load_target, target_names  # it reads YAML

    if problem.b.type.packed == problem.a.type.packed or target not in target_names():
        return problem
    backend, gpu = registry.get(Backend, config.backend), load_target(target)
    orders = (PLAIN, *registry.names(WeightLayout))
    stored = (replace(problem, b=problem.b._replace(order=order)) for order in orders)
    return next((one for one in stored if backend.check(config, one, gpu)), problem)


def _problems(cells: _aiter_rows.Cells, defaults: Defaults) -> Iterator[Problem]:
    kind = cells.text("q_type").rpartition(".")[2]
    weights = cells.text("q_dtype_w")
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise KeptError(f"q_type: no family here has experts with scales {kind or 'of no q_type'}; there are: {known}")
    for name in ("dtype", *(("q_dtype_a", "q_dtype_w") if kind != "No" else ())):
        cells.require(name, _aiter_rows.A_DTYPE)
    activations = cells.text("q_dtype_a")
    mixed = _OF_FOUR_BITS.get((activations, weights)) if kind == "per_1x32" else None
    if activations != weights and not mixed:
        raise KeptError(f"q_dtype_a, q_dtype_w: experts' {activations} by {weights} is multiplied by no family here")
    if cells.text("topk") == _ANY:
        raise KeptError(f"topk {_ANY} does not say to how many experts a token goes")
    tokens, hidden, inner, experts, chosen = (
        cells.integer(name, 1) for name in ("token", "model_dim", "inter_dim", "expert", "topk")
    )
    if chosen > experts:
        cells.fail(f"topk is {chosen}, of {experts} experts")
    usual = _FP8_BY_POWERS if (kind, "float8" in weights) == ("per_1x32", True) else _FAMILIES[kind]
    family, scales = mixed or usual
    given = {
        "family": family,
        "scales": scales,
        "dtype_a": activations if kind != "No" else cells.text("dtype"),
        "dtype_b": weights if mixed else "",
        "dtype_c": cells.text("dtype"),
        "row_major_a": True,
        "row_major_b": False,
        "groups": experts,
    }
    both = 2 * inner if cells.flag("use_g1u1") else inner
    for n, k in ((both, hidden), (hidden, inner)):
        try:
            yield make_problem(defaults, tokens * chosen, n, k, given)
        except InputError as error:
            cells.fail(f"can't be: {error}")


def translate(rows: Sequence[FormatRow], records: Iterable[Record], before: str, family: CsvFamily) -> Translation:
    """Write the results of layers, each in a row of both of its products, with the sum of their times."""
    best: dict[Problem, Record] = {}
    for record in records:
        best.setdefault(record.problem, record)
    columns = (*DEVICE, *(name for name in rows[0].subject if name not in DEVICE), *_RESULTS)
    table = CsvTable.parse(Path("the output"), before or ",".join(dict.fromkeys(columns)) + "\n")
    lines, written, omitted = merging.Lines(table, family), 0, list[tuple[Record, str]]()
    for _, layer in groupby(rows, key=lambda row: row.number):
        stages = list(layer)
        found = [best[row.problem] for row in stages if row.problem in best]
        if len(found) < len(_STAGES):
            omitted += [(record, "the other product of its layer has no result") for record in found]
            continue
        reason = _why_unwritable(found)
        if reason:
            omitted.append((found[0], reason))
            continue
        cells = _layer_cells(stages[0].subject, found)
        lines.put(lines.table.line_of(cells), cells)
        written += 1
    return Translation({"": lines.text() if written else before}, written, tuple(omitted))


def _why_unwritable(records: Sequence[Record]) -> str:
    """Return why the products of a layer can't be written, or ""."""
    if any(record.predicted for record in records):
        return "its time is a prediction"
    if any(record.target.startswith(_aiter_rows.TARGETS) for record in records):
        return "AITER's rows of layers name kernels of AITER's own alone"
    return "" if all(r.target and r.compute_units for r in records) else "it does not say which GPU it was tuned on"


def _layer_cells(subject: Mapping[str, str], records: Sequence[Record]) -> dict[str, str]:
    first, us = records[0], sum(record.seconds for record in records) * 1e6
    cells = {**subject, "gfx": first.target, "cu_num": str(first.compute_units)}
    cells |= {"block_m": str(first.config.block_m), "ksplit": str(first.config.split_k), "run_1stage": "0"}
    for stage, record in zip(_STAGES, records, strict=True):
        cells[f"us{stage}"] = str(round(record.seconds * 1e6, 4))
        cells |= {f"kernelName{stage}": record.config.name, f"err{stage}": "0.0%"}
    flops, moved = sum(r.problem.flops for r in records), sum(r.problem.bytes for r in records)
    return cells | {
        "us": str(round(us, 4)),
        "tflops": _aiter_rows.two_decimals(flops / us / 1e6),
        "bw": _aiter_rows.two_decimals(moved / us / 1e3),
    }
