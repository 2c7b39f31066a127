"""Format: the YAML of ROCm Triton's tune_gemm and tune_streamk, a list of maps, ↔ rows and records.

A row is a size (M, N, K, rowMajorA, rowMajorB; T is row-major, N column-major), or a result (BLOCK_SIZE_M … as well).
What a row leaves out:

    rowMajorA, rowMajorB, dtype_*, bias, family   the caller's defaults
    batch                                 1
    GROUP_SIZE_M, SPLIT_K                 1
    num_warps, num_stages                 4, 2; num_stages 0, an older Triton's word for its own pipeliner, is read as 2
    waves_per_eu, kpack, options …        left to the backend
    template, backend                     stream_k where the row has NUM_SMS, else tile; triton
    TFLOPS, time(us)                      a remark behind the row: # TFLOPS: 500.58 time(us): 1095.0
    winner, timer, cold                   the backend; tune_gemm; false, as it times with warm caches

instruction_sched_variant is read and dropped; today's Triton has no such option. Our own keys stand behind tune_gemm's,
which passes over them. Times are decimal shifts of seconds, so that what is written is read back equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from tritongemm.codegen.template_facts import odd_block
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import BIASES, Problem
from tritongemm.core.record import Record
from tritongemm.formats._rows import problem_of
from tritongemm.formats._yaml_rows import Entry, entries
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

FORMAT = "tune_gemm's YAML, a list of maps"
HEAD = "# Tuned by tritongemm: tune_gemm's keys, then tritongemm's. With timer: model, times are predictions.\n"

_SIZES = ("M", "N", "K")
_LAYOUTS = {"rowMajorA": "row_major_a", "rowMajorB": "row_major_b"}
_BLOCKS = {"BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k"}
_COUNTS = {"GROUP_SIZE_M": "group_m", "SPLIT_K": "split_k", "num_warps": "num_warps", "num_stages": "num_stages"}
_OPTIONS = {"NUM_SMS": "num_sms"} | {k: k for k in ("waves_per_eu", "matrix_instr_nonkdim", "kpack")}
_CONFIG = (*_BLOCKS, *_COUNTS, *_OPTIONS, "instruction_sched_variant", "template", "backend", "options")
_TIMES = ("TFLOPS", "time(us)")
_TYPED = ("dtype_a", "dtype_b", "dtype_c", "bias")
_RESULT = (
    *("target", "winner", "timer", "spread", "error", "tolerance"),
    *("library", "library_us", "tie", "verified", "cold", "toolchain"),
)
KEYS = (*_SIZES, *_LAYOUTS, *_CONFIG, *_TIMES, *_TYPED, "batch", "family", *_RESULT)

_REMARK = re.compile(r"#.*?\bTFLOPS:\s*(?P<tflops>\d[\d.]*)(?:.*?\btime\(us\):\s*(?P<us>\d[\d.]*))?")


def recognises(path: Path, text: str) -> bool:
    """Whether the file is YAML by its name, or begins with a list item."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith(("#", "---"))), "")
    return path.suffix.lower() in (".yaml", ".yml") or first.lstrip().startswith("-")


def read(path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
    """The rows of a file, in its order.

    Args:
        path: for messages.
        text: contents.
        defaults: what holds for a row that does not say.

    Raises:
        InputError: not such a file, or a row is wrong or double; names file, row, line and field.
    """
    rows: list[FormatRow] = []
    seen: dict[tuple[Problem, str], Entry] = {}
    for entry in entries(path, text, KEYS):
        problem, config = _problem(entry, defaults), _config(entry)
        row = FormatRow(problem, config, _record(entry, problem, config) if config else None, entry.line)
        # One file may hold a problem's results on several targets.
        twin = seen.setdefault((problem, row.record.target if row.record else ""), entry)
        if twin is not entry:
            entry.fail(f"repeats row {twin.row} (line {twin.line}), {problem.key}; keep one of them")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds an empty list")
    return rows


def _problem(entry: Entry, defaults: Defaults) -> Problem:
    missing = [k for k in _SIZES if k not in entry]
    if missing:
        entry.fail(f"has no {', '.join(missing)}; a row needs at least M, N and K")
    m, n, k = (entry.whole(key, 1, 0) for key in _SIZES)
    given: dict[str, Any] = {k: entry.text(k) for k in _TYPED if k in entry}
    if "bias" in given:
        entry.text("bias", choices=BIASES)
    for key, name in _LAYOUTS.items():
        if key in entry:
            given[name] = entry.text(key, choices=("T", "N")) == "T"
    given["batch"] = entry.whole("batch", 1, 1)
    given["family"] = entry.text("family", defaults.family, families())
    try:
        return problem_of(defaults, m, n, k, **given)
    except InputError as error:
        entry.fail(f"can't be: {error}")


def families() -> list[str]:
    """Names that a row's family may have: families, and their variants."""
    return [*registry.names(Family), *(name for f in registry.every(Family) for name in f.variants)]


def _config(entry: Entry) -> Config | None:
    """The row's config, or None for a bare size."""
    missing = [k for k in _BLOCKS if k not in entry]
    found = [k for k in (*_CONFIG, *_RESULT) if k in entry]
    if not found:
        return None
    if missing:
        entry.fail(f"has {found[0]} but no {', '.join(missing)}; a result needs its tile, a size only M, N and K")
    backend = entry.plugin("backend", "backends", "triton")
    triton = int(backend == "triton")  # another backend's kernel may have no tile that it tells
    numbers = {name: entry.whole(key, triton, 0) for key, name in _BLOCKS.items()}
    for (key, name), default in zip(_COUNTS.items(), (1, 1, 4, 2), strict=True):
        numbers[name] = entry.whole(key, 0 if key == "num_stages" else triton, default)
    if triton:
        numbers["num_stages"] = numbers["num_stages"] or 2
    options = {name: entry.whole(key, 0, 0) for key, name in _OPTIONS.items() if key in entry}
    options |= entry.wholes("options")
    template = entry.text("template", "stream_k" if "NUM_SMS" in entry else "tile")
    config = Config(template=template, options=tuple(options.items()), backend=backend, **numbers)
    if triton and (odd := odd_block(config)):
        entry.fail(f"{next(key for key, name in _BLOCKS.items() if name == odd[0])} {odd[1]}")
    try:
        if Config.parse(config.name) == config:
            return config
    except InputError:
        pass
    entry.fail(f"has a template {template!r} or options ({', '.join(options)}) that no config name can hold")


def _record(entry: Entry, problem: Problem, config: Config) -> Record | None:
    """The row's result, or None where it has no time."""
    seconds, flops = entry.shifted("time(us)", -6), entry.shifted("TFLOPS", 12)
    remark = _REMARK.match(entry.remark)
    if seconds is None and flops is None and remark:
        try:
            flops, us = float(remark["tflops"]) * 1e12, remark["us"]
            seconds = float(us) / 1e6 if us else None
        except ValueError:
            entry.fail(f"has a remark that can't be read: {entry.remark}")
    if seconds is None and flops:
        seconds = problem.flops / flops
    if not seconds:
        return None
    return Record(
        problem=problem,
        target=entry.text("target"),
        config=config,
        winner=entry.text("winner", config.backend),
        seconds=seconds,
        spread=entry.number("spread") or 0.0,
        timer=entry.text("timer", "tune_gemm"),
        error=entry.number("error"),
        tolerance=entry.number("tolerance"),
        library_seconds=entry.shifted("library_us", -6),
        library=entry.text("library"),
        tie=entry.flag("tie"),
        verified=entry.text("verified"),
        toolchain=entry.texts("toolchain"),
        cold=entry.flag("cold"),
    )


def write(records: Iterable[Record]) -> str:
    """The records as a file: one line each, in the order given. `read` gives equal records back."""
    return HEAD + "".join(f"- {_flow(_row(r))}\n" for r in records)


def _row(record: Record) -> dict[str, Any]:
    """What a record's line holds, in the order of its keys."""
    problem, config = record.problem, record.config
    options = dict(config.options)
    row: dict[str, Any] = {"M": problem.m, "N": problem.n, "K": problem.k}
    row |= {"rowMajorA": problem.layout[0], "rowMajorB": problem.layout[1]}
    row |= {key: getattr(config, name) for key, name in (*_BLOCKS.items(), *_COUNTS.items())}
    row |= {key: options.pop(name) for key, name in _OPTIONS.items() if name in options}
    if "NUM_SMS" in row and config.split_k == 1:
        del row["SPLIT_K"]  # tune_streamk's rows have the one instead of the other
    row |= {"TFLOPS": float(f"{record.tflops:.5g}"), "time(us)": _microseconds(record.seconds)}
    row |= {key: getattr(problem, key) for key in (*_TYPED, "batch", "family")}
    row |= {"template": config.template, "backend": config.backend, "options": options or None}
    row |= {"target": record.target, "winner": record.winner, "timer": record.timer, "spread": record.spread}
    row |= {"error": record.error, "tolerance": record.tolerance, "library": record.library or None}
    row |= {"library_us": None if record.library_seconds is None else _microseconds(record.library_seconds)}
    row |= {"tie": record.tie, "verified": record.verified, "cold": record.cold}
    row |= {"toolchain": dict(sorted(record.toolchain.items()))}
    return {key: value for key, value in row.items() if value is not None}


def _microseconds(seconds: float) -> Decimal:
    """Shifted, not multiplied: a product would be rounded, and would not come back."""
    return Decimal(repr(seconds)).scaleb(6)


def _flow(value: object) -> str:
    """A value in YAML's flow style, quoted as Python prints it, which is how tune_gemm's files look."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, Decimal):
        text = format(value.normalize(), "f")
        return text if "." in text else f"{text}.0"
    if isinstance(value, str | float):
        style = '"' if isinstance(value, str) else None
        return yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True).splitlines()[0]
    return str(value)
