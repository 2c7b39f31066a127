"""tune_gemm's YAML, sizes and results, with our own fields beside its own.

A row is a map. Its keys and the defaults of those that are missing:

    M, N, K                        sizes; no default
    rowMajorA, rowMajorB           T (row-major) or N (column-major); the command line's layouts
    dtype_a, dtype_b, dtype_c      the command line's
    bias, batch, family            the command line's bias, 1, dense
    BLOCK_SIZE_M, _N, _K           no default: a row without them is a size
    GROUP_SIZE_M, SPLIT_K          1
    NUM_SMS                        makes the row a stream-K config
    num_warps, num_stages          4, 2 (0, an older Triton's word for its own pipeliner, is read as 2)
    waves_per_eu, matrix_instr_nonkdim, kpack, options    compiler options; not set
    template, backend              tile, triton
    instruction_sched_variant      read and dropped: no longer an option of Triton
    TFLOPS, time(us)               also read from a trailing "# TFLOPS: 500.58 time(us): 1095.0"
    target, winner, timer, spread, error, tolerance, library, library_us, tie, verified, cold, toolchain    ours
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tritongemm.config import Config
from tritongemm.errors import InputError
from tritongemm.problem import Problem
from tritongemm.record import Record

if TYPE_CHECKING:
    from tritongemm.sizes import Defaults, Row

TUNED_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
_INTEGERS = {
    "M", "N", "K", "batch", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "SPLIT_K", "NUM_SMS",
    "num_warps", "num_stages", *TUNED_OPTIONS,
}  # fmt: skip
_NUMBERS = {"TFLOPS", "time(us)", "spread", "error", "tolerance", "library_us"}
_FLAGS = {"tie", "cold"}
_MAPS = {"toolchain", "options"}
_TEXTS = {
    "rowMajorA", "rowMajorB", "dtype_a", "dtype_b", "dtype_c", "bias", "family", "template", "backend",
    "instruction_sched_variant", "target", "winner", "timer", "library", "verified",
}  # fmt: skip
KEYS = _INTEGERS | _NUMBERS | _FLAGS | _MAPS | _TEXTS
_REMARK = re.compile(r"#.*?TFLOPS:\s*([\d.]+).*?time\(us\):\s*([\d.]+)")


def recognises(path: Path, text: str) -> bool:
    """YAML is what remains when no other format claims a file by its suffix."""
    return path.suffix.lower() not in (".csv", ".json", ".log")


def read(path: Path, text: str, defaults: Defaults) -> list[Row]:
    """The rows of a file.

    Raises:
        InputError: not a list of maps, or a row with a wrong key or value; names file, line and field.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode):
        raise InputError(f"{path}: must be a list of maps, e.g. - {{M: 16, N: 16, K: 16}}")
    lines = text.splitlines()
    return [_row(path, number, node, lines, defaults) for number, node in enumerate(root.value, 1)]


def _row(path: Path, number: int, node: yaml.Node, lines: list[str], defaults: Defaults) -> Row:
    from tritongemm.sizes import Row

    line = node.start_mark.line + 1
    where = f"{path}: row {number} (line {line})"
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{where}: must be a map, e.g. {{M: 16, N: 16, K: 16}}")
    data = _fields(where, node)
    for name in ("M", "N", "K"):
        if name not in data:
            raise InputError(f"{where}: {name} is missing")
    try:
        problem = _problem(data, defaults)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    remark = _REMARK.search(lines[node.end_mark.line] if node.end_mark.line < len(lines) else "")
    if remark:
        data.setdefault("TFLOPS", float(remark[1]))
        data.setdefault("time(us)", float(remark[2]))
    config = _config(where, data)
    return Row(problem, config, _record(problem, config, data), line)


def _fields(where: str, node: yaml.MappingNode) -> dict[str, Any]:
    loader = yaml.SafeLoader("")
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, value = loader.construct_object(key_node), loader.construct_object(value_node, deep=True)
        if key in data:
            raise InputError(f"{where}: {key} is there twice; remove one")
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(KEYS))}"
            raise InputError(f"{where}: unknown key {key!r}; {hint}")
        data[key] = _checked(where, key, value)
    return data


def _checked(where: str, key: str, value: Any) -> Any:
    """The value, if it is of the key's kind."""
    kinds: list[tuple[set[str], tuple[type, ...], str]] = [
        (_INTEGERS, (int,), "a whole number"),
        (_NUMBERS, (int, float), "a number"),
        (_FLAGS, (bool,), "true or false"),
        (_MAPS, (dict,), "a map"),
        (_TEXTS, (str,), "text"),
    ]
    for keys, types, words in kinds:
        wrong_bool = isinstance(value, bool) and bool not in types
        if key in keys and (not isinstance(value, types) or wrong_bool):
            raise InputError(f"{where}: {key} must be {words}, not {value!r}")
    if key in ("rowMajorA", "rowMajorB") and value not in ("T", "N"):
        raise InputError(f"{where}: {key} must be T (row-major) or N (column-major), not {value!r}")
    least = 0 if key in ("num_stages", *TUNED_OPTIONS) else 1
    if key in _INTEGERS and value < least:
        raise InputError(f"{where}: {key} must be at least {least}, not {value}")
    return value


def _problem(data: dict[str, Any], defaults: Defaults) -> Problem:
    a, b, c = defaults.dtypes(data.get("dtype_a"), data.get("dtype_b"), data.get("dtype_c"))
    return Problem(
        data["M"],
        data["N"],
        data["K"],
        a,
        b,
        c,
        row_major_a=data["rowMajorA"] == "T" if "rowMajorA" in data else defaults.row_major_a,
        row_major_b=data["rowMajorB"] == "T" if "rowMajorB" in data else defaults.row_major_b,
        bias=data.get("bias", defaults.bias),
        batch=data.get("batch", 1),
        family=data.get("family", "dense"),
    )


def _config(where: str, data: dict[str, Any]) -> Config | None:
    blocks = [data.get(f"BLOCK_SIZE_{axis}") for axis in "MNK"]
    if all(b is None for b in blocks):
        return None
    for axis, block in zip("MNK", blocks, strict=True):
        if block is None:
            raise InputError(f"{where}: BLOCK_SIZE_{axis} is missing")
        if block & (block - 1):
            raise InputError(f"{where}: BLOCK_SIZE_{axis} must be a power of two, not {block}")
    options = {name: data[name] for name in TUNED_OPTIONS if name in data} | data.get("options", {})
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{where}: option {name} must be a whole number, not {value!r}")
    if "NUM_SMS" in data:
        options["num_sms"] = data["NUM_SMS"]
    return Config(
        template=data.get("template", "stream_k" if "NUM_SMS" in data else "tile"),
        block_m=blocks[0],  # type: ignore[arg-type]
        block_n=blocks[1],  # type: ignore[arg-type]
        block_k=blocks[2],  # type: ignore[arg-type]
        group_m=data.get("GROUP_SIZE_M", 1),
        split_k=data.get("SPLIT_K", 1),
        num_warps=data.get("num_warps", 4),
        num_stages=data.get("num_stages", 2) or 2,
        options=tuple(options.items()),
        backend=data.get("backend", "triton"),
    )


def _record(problem: Problem, config: Config | None, data: dict[str, Any]) -> Record | None:
    if config is None or not data.get("time(us)"):
        return None
    library = data.get("library_us")
    return Record(
        problem=problem,
        target=data.get("target", ""),
        config=config,
        winner=data.get("winner", config.backend),
        seconds=float(data["time(us)"]) / 1e6,
        spread=float(data.get("spread", 0.0)),
        timer=data.get("timer", ""),
        error=data.get("error"),
        tolerance=data.get("tolerance"),
        library_seconds=None if library is None else float(library) / 1e6,
        library=data.get("library", ""),
        tie=data.get("tie", False),
        verified=data.get("verified", ""),
        toolchain={str(k): str(v) for k, v in data.get("toolchain", {}).items()},
        cold=data.get("cold", True),
    )


def write(records: Iterable[Record]) -> str:
    """The text of a results file: a row each, tune_gemm's keys first. `read` gives back equal records."""
    head = "# Tuned by tritongemm; tune_gemm's keys, then tritongemm's. time(us) with timer: model is a prediction.\n"
    return head + "".join(f"- {_flow(_fields_of(r))}\n" for r in records)


def _fields_of(record: Record) -> dict[str, Any]:
    problem, config = record.problem, record.config
    options = dict(config.options)
    row: dict[str, Any] = {"M": problem.m, "N": problem.n, "K": problem.k}
    row |= {"rowMajorA": "T" if problem.row_major_a else "N", "rowMajorB": "T" if problem.row_major_b else "N"}
    row |= dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"), config.tile, strict=True))
    row |= {"GROUP_SIZE_M": config.group_m, "SPLIT_K": config.split_k}
    row |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    row |= {name: options.pop(name) for name in TUNED_OPTIONS if name in options}
    row |= {"TFLOPS": round(record.tflops, 2), "time(us)": record.seconds * 1e6}
    row |= {"dtype_a": problem.dtype_a, "dtype_b": problem.dtype_b, "dtype_c": problem.dtype_c, "bias": problem.bias}
    row |= {"batch": problem.batch, "family": problem.family, "template": config.template, "backend": config.backend}
    row |= {"options": options} if options else {}
    row |= {"target": record.target, "winner": record.winner, "timer": record.timer, "spread": record.spread}
    row |= {} if record.error is None else {"error": record.error}
    row |= {} if record.tolerance is None else {"tolerance": record.tolerance}
    if record.library_seconds is not None:
        row |= {"library": record.library, "library_us": record.library_seconds * 1e6}
    row |= {"tie": record.tie, "verified": record.verified, "cold": record.cold, "toolchain": record.toolchain}
    return row


def _flow(row: dict[str, Any]) -> str:
    return yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=10**9).strip()
