"""Reads and writes tables of launches as JSON values: whatever a file says, a launch of bounded numbers comes out."""

import re
from collections.abc import Mapping
from dataclasses import fields
from math import prod
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.launch import MOST_PROGRAMS, Buffer, Launch, Param, StridePlaces
from tritongemm.core.values import FINITE, FLAG, MAP, MOST, TEXT, FieldKind, integer, list_of, map_of, require
from tritongemm.export.library.code_object import require_all
from tritongemm.export.library.launch_table import LaunchTable, Run, names_of

_MOST_PARAMS, _MOST_RUNS = 256, 1 << 16
_MOST_THREADS, _MOST_SHARED, _MOST_CLUSTER = 1024, 1 << 20, 16  # of any GPU
_MOST_BLOCK_BYTES = 1 << 15  # of parameters
_MOST_BYTES = 1 << 40  # of a buffer
_MOST_NUMBER = 2**63 - 1
_LONGEST_SYMBOL = 4096  # characters
_KINDS = ("pointer", "i32", "u32", "i64", "f32", "tma", "pad")
_PLAIN = Param("pointer")
_PAIRS = ("box", "shape")
_CODES = ("stride", "elem_type", "elem_size", "swizzle")


_NUMBER = integer(-_MOST_NUMBER, _MOST_NUMBER)
_SYMBOL = FieldKind("the name of a kernel", lambda v: TEXT.holds(v) and 0 < len(v) <= _LONGEST_SYMBOL)
_LAUNCH_KINDS = {
    "symbol": _SYMBOL,
    "grid": list_of(integer(1, MOST_PROGRAMS[0]), 3),
    "block": list_of(integer(1, _MOST_THREADS), 3),
    "shared": integer(0, _MOST_SHARED),
    "cluster": integer(1, _MOST_CLUSTER),
    "overlap": FLAG,
    "at": list_of(integer(0, _MOST_BLOCK_BYTES), most=_MOST_PARAMS),
    "params": list_of(MAP, most=_MOST_PARAMS),
    "buffers": map_of(integer(1, _MOST_BYTES), _MOST_PARAMS),
    "zeroed": map_of(integer(1, _MOST_BYTES), _MOST_PARAMS),
}
_TABLE_KINDS = {
    "low": integer(1, MOST),
    "high": integer(1, MOST),
    "launch": MAP,
    "runs": map_of(list_of(list_of(_NUMBER, 4), most=_MOST_RUNS), 2 * _MOST_PARAMS),
}
_PLACES_KINDS = {"most_lead": integer(1, _MOST_NUMBER), "places": map_of(list_of(integer(1, 1 << 12), 2), _MOST_PARAMS)}
_STRIDE = re.compile("(stride|batch)_[a-z_]{1,64}")
_VALUE_KINDS = {
    "pointer": FieldKind("the name of a buffer", lambda v: TEXT.holds(v) and len(v) <= 64),
    "tma": FieldKind("the name of a buffer", lambda v: TEXT.holds(v) and len(v) <= 64),
    "f32": FieldKind("a number", lambda v: FINITE.holds(v) or (isinstance(v, float) and FINITE.holds(-v))),
    "pad": integer(0, _MOST_BLOCK_BYTES),
}


def table_to_json(table: LaunchTable) -> dict[str, Any]:
    """Return a table as JSON values; the code object is named beside it."""
    runs = {name: [list(run) for run in runs] for name, runs in table.runs.items()}
    return {"low": table.low, "high": table.high, "launch": launch_to_json(table.launch), "runs": runs}


def launch_to_json(launch: Launch) -> dict[str, Any]:
    """Return a launch as JSON values; the code object is named beside it."""
    return {
        "symbol": launch.symbol,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "shared": launch.shared,
        "cluster": launch.cluster,
        "overlap": launch.overlap,
        "at": launch.offsets(),
        "params": [_param_to_json(param) for param in launch.params],
        "buffers": {buffer.name: buffer.bytes for buffer in launch.buffers},
        "zeroed": {buffer.name: buffer.bytes for buffer in launch.zeroed},
    }


def places_to_json(strides: StridePlaces) -> dict[str, Any]:
    """Return where a launch has strides, as JSON values."""
    return {"most_lead": strides.most_lead, "places": {name: list(place) for name, place in strides.places.items()}}


def places_from_json(data: Any, launch: Launch) -> StridePlaces:
    """Return the places of which `places_to_json` wrote these values."""
    if not isinstance(data, Mapping):
        raise InputError("strides must be a map")
    require_all("its strides", data, _PLACES_KINDS)
    counted = {index for index, param in enumerate(launch.params) if param.kind in ("i32", "i64")}
    for name, (index, _) in data["places"].items():
        if not _STRIDE.fullmatch(name) or index not in counted:
            raise InputError(f"strides must be numbers among the parameters, not {name!r:.80} at {index}")
    return StridePlaces(data["most_lead"], {name: (index, by) for name, (index, by) in data["places"].items()})


def table_from_json(data: Mapping[str, Any], sha256: str) -> LaunchTable:
    """Return the table of which `table_to_json` wrote these values."""
    require_all("its launches", data, _TABLE_KINDS)
    if data["low"] > data["high"]:
        raise InputError(f"low must be at most high, {data['high']}, not {data['low']}")
    launch = launch_from_json(data["launch"], sha256)
    runs = {name: tuple(Run(*run) for run in each) for name, each in data["runs"].items()}
    table = LaunchTable(data["low"], data["high"], launch, runs)
    for name, each in runs.items():
        _check_runs(table, name, each)
    return table


def _check_runs(table: LaunchTable, name: str, runs: tuple[Run, ...]) -> None:
    starts = [run.start for run in runs]
    if name not in names_of(table.launch) or not runs:
        raise InputError(f"runs must be of numbers of the launch, not of {name}")
    if starts != sorted(set(starts)) or starts[0] != table.low or starts[-1] > table.high:
        raise InputError(f"runs of {name} must begin at {table.low} and go up to at most {table.high}")
    ends = [start - 1 for start in starts[1:]] + [table.high]
    least = 0 if name.startswith("buffers.") else 1
    most = _MOST_BYTES if name.startswith(("buffers.", "zeroed.")) else _most_of(table.launch, name)
    for run, end in zip(runs, ends, strict=True):
        if run.every < 1 or not all(least <= value <= most for value in (run.value, run.at(end))):
            raise InputError(f"runs of {name} must stay within {least} and {most}")


def _most_of(launch: Launch, name: str) -> int:
    """Return the largest value of a number of a launch other than a buffer's."""
    if name.startswith("grid."):
        return MOST_PROGRAMS[int(name[5:])]
    kind = launch.params[int(name.split(".")[1])].kind
    return _MOST_NUMBER if kind == "i64" or name.endswith(".stride") else MOST


def launch_from_json(data: Mapping[str, Any], sha256: str) -> Launch:
    """Return the launch of which `launch_to_json` wrote these values; errors are those of `table_from_json`."""
    require_all("its launch", data, _LAUNCH_KINDS)
    if prod(data["block"]) > _MOST_THREADS:
        raise InputError(f"block must have at most {_MOST_THREADS} threads, not {prod(data['block'])}")
    if any(count > most for count, most in zip(data["grid"], MOST_PROGRAMS, strict=True)):
        raise InputError(f"grid must be at most {MOST_PROGRAMS}, not {data['grid']}")
    params = tuple(map(_param_from_json, data["params"]))
    _check_offsets(data["at"], params)
    return Launch(
        path="",
        symbol=data["symbol"],
        grid=tuple(data["grid"]),
        block=tuple(data["block"]),
        shared=data["shared"],
        params=params,
        buffers=tuple(Buffer(*pair) for pair in data["buffers"].items()),
        cluster=data["cluster"],
        at=tuple(data["at"]),
        overlap=data["overlap"],
        zeroed=tuple(Buffer(*pair) for pair in data["zeroed"].items()),
        sha256=sha256,
    )


def _check_offsets(offsets: list[int], params: tuple[Param, ...]) -> None:
    """Refuse parameters that overlap, or are placed where no address can be written."""
    end = 0
    if len(offsets) != len(params):
        raise InputError(f"at must have {len(params)} offsets, one for each parameter, not {len(offsets)}")
    for offset, param in zip(offsets, params, strict=True):
        if offset < end or (param.kind in ("pointer", "tma") and offset % 8):
            raise InputError(f"at must have offsets of parameters one after another, not {offset} after {end}")
        end = offset + param.size
    if end > _MOST_BLOCK_BYTES:
        raise InputError(f"parameters must take at most {_MOST_BLOCK_BYTES} bytes, not {end}")


def _param_to_json(param: Param) -> dict[str, Any]:
    """Return a parameter without its empty fields."""
    every = {f.name: getattr(param, f.name) for f in fields(param)}
    values = {name: value for name, value in every.items() if value != getattr(_PLAIN, name)}
    return {"kind": param.kind, "value": param.value, **values}


def _param_from_json(data: Mapping[str, Any]) -> Param:
    kind = data.get("kind")
    if kind not in _KINDS:
        raise InputError(f"a parameter's kind must be one of {', '.join(_KINDS)}, not {kind!r:.40}")
    if unknown := data.keys() - {f.name for f in fields(Param)}:
        raise InputError(f"a parameter has no field {min(map(str, unknown)):.40}")
    kinds = dict.fromkeys(_PAIRS, list_of(integer(0, _MOST_NUMBER), 2)) | dict.fromkeys(
        _CODES, integer(0, _MOST_NUMBER)
    )
    require({"value": 0, **data}, {**kinds, "value": _VALUE_KINDS.get(str(kind), _NUMBER)})
    return Param(**{**data, **{name: tuple(data[name]) for name in _PAIRS if name in data}})
