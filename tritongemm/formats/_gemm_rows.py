"""Converts the keys of a YAML row, this project's and tune_gemm's, to and from problems, configs and records.

A row is a size (M, N, K, rowMajorA, rowMajorB; T is row-major, N column-major), or a result (BLOCK_SIZE_M … as well).
What a row leaves out:

    rowMajorA, rowMajorB, dtype_*, bias, family   the caller's defaults
    batch, shared                         the caller's too; "" in a row with a batch that does not say what it shares
    order_b, scales                       what the family or its variant says; the caller's without a family
    groups                                the caller's, which is 1 mostly
    group_form, group_spread              contiguous, masked where there is group_room; uniform, or as group_counts
                                          or group_shares (the part of M that each group has, in any order) says
    GROUP_SIZE_M, SPLIT_K                 1
    num_warps, num_stages                 4, 2; num_stages 0 in a row without a backend is an older Triton's word for
                                          its own pipeliner, and is read as 2
    waves_per_eu, kpack, options …        left to the backend
    template, backend                     stream_k where the row has NUM_SMS, else tile; that of a config
    TFLOPS, time(us)                      a remark behind the row: # TFLOPS: 500.58 time(us): 1095.0
    winner, timer, cold                   the backend; tune_gemm; false, as it times with warm caches
    compute_units                         0: any device of the target
    M_from, held_out                      the row serves its own M alone; nothing
    count, operation, callers             1; not said; not said

instruction_sched_variant is read and dropped; today's Triton has no such option. Times are decimal shifts of seconds,
so that what is written is read back equal.
"""

import re
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from tritongemm.core.config import DEFAULT_BACKEND, Config
from tritongemm.core.epilogues import EPILOGUES
from tritongemm.core.errors import InputError, NewerFileError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile
from tritongemm.core.group_rows import GROUP_FORMS, SPREADS, Groups, check_shares, counts_of_shares
from tritongemm.core.problem import BIASES, PLAIN, Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.scaling import NO_SCALES, granularity
from tritongemm.core.values import SECONDS
from tritongemm.formats._rows import make_problem
from tritongemm.formats._yaml_rows import Entry, read_entries
from tritongemm.formats._yaml_values import shown
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, WeightLayout

GROUP_KEYS = ("group_form", "group_spread", "group_counts", "group_room")
SHARE_KEYS = ("group_shares", "group_samples")  # of sizes, as a capture writes them


def read_several(entry: Entry, m: int) -> dict[str, Any]:
    """Return how many products a row is of, and what they share; only what it says, by the names of a `Problem`."""
    said: dict[str, Any] = {"batch": entry.integer("batch", 1, 1)} if "batch" in entry.values else {}
    if "shared" in entry.values:
        said["shared"] = entry.text("shared", choices=("a", "b"))
    groups = entry.integer("groups", 1, 1)
    return said | {"groups": groups} | _read_groups(entry) | _read_shares(entry, m, groups)


def _read_groups(entry: Entry) -> dict[str, Any]:
    """Return how a row shares its rows out to groups; only what it says."""
    said: dict[str, Any] = {}
    if "group_form" in entry.values:
        said["group_form"] = entry.text("group_form", choices=GROUP_FORMS)
    if "group_spread" in entry.values:
        said["spread"] = entry.text("group_spread", choices=SPREADS)
    if "group_counts" in entry.values:
        said["counts"] = entry.whole_numbers("group_counts")
    if "group_room" in entry.values:
        said["room"] = entry.integer("group_room", 1, 0)
    if said and "groups" not in entry.values:
        entry.fail(f"has {next(k for k in GROUP_KEYS if k in entry.values)} but no groups; name both or neither")
    return said


def _read_shares(entry: Entry, m: int, groups: int) -> dict[str, Any]:
    """Return the rows of each group of a size, by the groups' captured shares; nothing without."""
    entry.integer("group_samples", 1, 1)
    if "group_shares" not in entry.values:
        return {}
    if groups == 1 or "group_counts" in entry.values:
        entry.fail("has group_shares, which is for a row with several groups and without group_counts")
    shares = entry.numbers("group_shares")
    try:
        check_shares(groups, shares)
    except InputError as error:
        entry.fail(f"group_shares can't be: {error}")
    return {"counts": counts_of_shares(m, shares)}


def groups_row(groups: Groups | None) -> dict[str, Any]:
    """Return how a problem's rows are shared out to groups, as far as it differs from a row's defaults."""
    if groups is None:
        return {}
    found: dict[str, Any] = {"group_spread": groups.spread} if groups.spread == "skewed" else {}
    found |= {"group_counts": list(groups.counts)} if groups.counts else {}
    return found | ({"group_form": "masked", "group_room": groups.room} if groups.room else {})


_SIZES = ("M", "N", "K")
_LAYOUTS = {"rowMajorA": "row_major_a", "rowMajorB": "row_major_b"}
_BLOCKS = {"BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k"}
_COUNTS = {"GROUP_SIZE_M": "group_m", "SPLIT_K": "split_k", "num_warps": "num_warps", "num_stages": "num_stages"}
_OPTIONS = {"NUM_SMS": "num_sms"} | {k: k for k in ("waves_per_eu", "matrix_instr_nonkdim", "kpack")}
_TIMES = ("TFLOPS", "time(us)")
_THEIR_CONFIG = (*_BLOCKS, *_COUNTS, *_OPTIONS, "instruction_sched_variant")
_OUR_CONFIG = ("template", "backend", "options")
_CHOICES = {"bias": BIASES, "epilogue": EPILOGUES}
_TYPED = ("dtype_a", "dtype_b", "dtype_c", "bias", "epilogue")
_OUR_PROBLEM = (*_TYPED, "batch", "groups", *GROUP_KEYS, "shared", "family", "order_b", "scales")
_OUR_WORKLOAD = ("count", "operation", "callers", *SHARE_KEYS)  # of sizes, as a capture writes them
_OUR_RESULT = (
    *("target", "compute_units", "winner", "timer", "spread", "error", "tolerance"),
    *("library", "library_us", "library_wrong", "tie", "verified", "cold", "toolchain", "M_from", "held_out"),
    *("quantize_us", "code", "order", "row_bits", "notes"),
)

THEIR_KEYS = (*_SIZES, *_LAYOUTS, *_THEIR_CONFIG, *_TIMES)  # those of tune_gemm and tune_streamk
OUR_KEYS = (*_OUR_CONFIG, *_OUR_PROBLEM, *_OUR_WORKLOAD, *_OUR_RESULT)
KEYS = (*THEIR_KEYS[:5], *_THEIR_CONFIG, *_OUR_CONFIG, *_TIMES, *_OUR_PROBLEM, *_OUR_WORKLOAD, *_OUR_RESULT)

_MOST_CALLS = 10**18  # as many as a capture writes digits; sums of their times are finite

_CONFIG_KEYS = dict.fromkeys((*_THEIR_CONFIG, *_OUR_CONFIG, *_OUR_RESULT))
_AFTER_SIZES = tuple(f.name for f in fields(Problem))[3:]
_REMARK = re.compile(r"#.*?\bTFLOPS:\s*(?P<tflops>\d[\d.]*)(?:.*?\btime\(us\):\s*(?P<us>\d[\d.]*))?")

_SCHEMA = re.compile(r"# Tuned by tritongemm(?:, schema (?P<number>\d{1,9}))?:")
# a key of this project, in a map of flow style or at the beginning of a line
_OUR_KEY = re.compile(rf"""(?m)(?:^[ \t-]*|[{{,]\s*)['"]?(?:{"|".join(OUR_KEYS)})['"]?\s*:(?:\s|$)""")


def has_our_keys(text: str) -> bool:
    """Return whether a list of rows has this project's first line, or a key that tune_gemm's rows lack."""
    if _SCHEMA.match(text):
        return True
    return bool(_OUR_KEY.search("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))))


class RowReader:
    """Reads the rows of one file. What rows share, their kinds of problems and their configs, is checked once."""

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._families = [*registry.names(Family), *(name for f in registry.every(Family) for name in f.variants)]
        self._orders, self._backends = (PLAIN, *registry.names(WeightLayout)), registry.names(Backend)
        self._kinds: dict[tuple[object, ...], tuple[Any, ...]] = {}  # a problem's fields after its sizes
        self._configs: dict[tuple[Any, ...], Config] = {}
        self._seen: dict[tuple[Problem, str, int], tuple[int, int]] = {}  # row and line of each result

    def read(self, entry: Entry) -> FormatRow:
        """Return the row of an entry."""
        problem, config = self._problem(entry), self._config(entry)
        record = _record(entry, problem, config) if config else None
        count = entry.number("count")
        if count == 0:
            entry.fail("count must be above 0; remove a row without calls")
        if count is not None and count > _MOST_CALLS:
            entry.fail(f"count must be at most {_MOST_CALLS}, not {count:g}")
        return FormatRow(
            problem, config, record, entry.line, entry.row, entry.text("target"),
            count=1.0 if count is None else count, operation=entry.text("operation"), callers=entry.names("callers"),
        )  # fmt: skip

    def refuse_twin(self, entry: Entry, row: FormatRow) -> None:
        """Refuse a row that an earlier one of the file repeats.

        One file may hold a problem's results on several targets, and on devices of several sizes.
        """
        where = (row.record.target, row.record.compute_units) if row.record else ("", 0)
        number, line = self._seen.setdefault((row.problem, *where), (entry.row, entry.line))
        if number != entry.row:
            entry.fail(f"repeats row {number} (line {line}), {row.problem.key}; keep one of them")

    def _problem(self, entry: Entry) -> Problem:
        missing = [k for k in _SIZES if k not in entry.values]
        if missing:
            entry.fail(f"has no {', '.join(missing)}; a row needs at least M, N and K")
        m, n, k = (entry.integer(key, 1, 0) for key in _SIZES)
        given: dict[str, Any] = {k: entry.text(k, choices=_CHOICES.get(k, ())) for k in _TYPED if k in entry.values}
        for key, name in _LAYOUTS.items():
            if key in entry.values:
                given[name] = entry.text(key, choices=("T", "N")) == "T"
        given |= read_several(entry, m)
        if "family" in entry.values:
            given["family"] = entry.text("family", choices=self._families)
        if "order_b" in entry.values:
            given["order_b"] = entry.text("order_b", choices=self._orders)
        if "scales" in entry.values:
            given["scales"] = entry.text("scales")
        kind = tuple(given.items())
        try:
            if kind not in self._kinds:
                if "family" in given:
                    given.setdefault("order_b", registry.family_of(given["family"])[1].b.order)
                    given.setdefault("scales", "")
                model = make_problem(self._defaults, m, n, k, given)
                if model.groups:
                    return model  # whether its groups add up depends on its sizes
                self._kinds[kind] = tuple(getattr(model, name) for name in _AFTER_SIZES)
            return Problem(m, n, k, *self._kinds[kind])
        except InputError as error:
            entry.fail(f"can't be: {error}")

    def _config(self, entry: Entry) -> Config | None:
        """Return the row's config, or None for a bare size."""
        if entry.values.keys().isdisjoint(_CONFIG_KEYS):
            return None
        missing = [k for k in _BLOCKS if k not in entry.values]
        if missing:
            given = next(k for k in _CONFIG_KEYS if k in entry.values)
            entry.fail(f"has {given} but no {', '.join(missing)}; a result needs its tile, a size only M, N and K")
        backend = entry.text("backend", DEFAULT_BACKEND, self._backends)
        numbers = {name: entry.integer(key, 0, 0) for key, name in _BLOCKS.items()}
        for (key, name), default in zip(_COUNTS.items(), (1, 1, 4, 2), strict=True):
            numbers[name] = entry.integer(key, 0, default)
        if "backend" not in entry.values:
            numbers["num_stages"] = numbers["num_stages"] or 2
        options = {name: entry.integer(key, 0, 0) for key, name in _OPTIONS.items() if key in entry.values}
        options |= entry.integers("options")
        template = entry.text("template", "stream_k" if "NUM_SMS" in entry.values else "tile")
        values: tuple[Any, ...] = (template, *numbers.values(), tuple(options.items()), backend)
        if values not in self._configs:
            self._configs[values] = _nameable(entry, Config(*values))
        return self._configs[values]


def _nameable(entry: Entry, config: Config) -> Config:
    """Return the config, whose name must have all of it."""
    try:
        if Config.parse(config.name) == config:
            return config
    except InputError:
        pass
    options = ", ".join(name for name, _ in config.options)
    entry.fail(
        f"has a template {shown(config.template)} or options ({shown(options)[1:-1]}) that no config name can hold"
    )


def read_rows(path: Path, text: str, defaults: Defaults) -> ResultsFile:
    """Return the rows of a file; those that are wrong or double are among the damaged ones."""
    head = _SCHEMA.match(text)
    if head and (schema := int(head["number"] or 0)) > SCHEMA:
        raise NewerFileError(path, schema, SCHEMA)
    reader = RowReader(defaults)
    rows: list[FormatRow] = []
    damaged: list[DamagedRow] = []
    sizes: dict[Problem, int] = {}  # place of each among the rows
    for entry in read_entries(path, text, KEYS):
        try:
            entry.require_map()
            entry.refuse_unknown_keys()
            row = reader.read(entry)
            place = sizes.setdefault(row.problem, len(rows)) if row.config is None else len(rows)
            if place < len(rows) and (row.operation or rows[place].operation):
                rows[place] = _joined(rows[place], row)
                continue
            reader.refuse_twin(entry, row)
            rows.append(row)
        except InputError as error:
            damaged.append(DamagedRow(entry.row, entry.line, str(error)))
    return ResultsFile(tuple(rows), tuple(damaged))


def _joined(first: FormatRow, second: FormatRow) -> FormatRow:
    """Return one row of two sizes of a workload that differ in their operations."""
    operations = dict.fromkeys(filter(None, (*first.operation.split(", "), second.operation)))
    callers = tuple(dict.fromkeys((*first.callers, *second.callers)))
    return replace(first, count=first.count + second.count, operation=", ".join(operations), callers=callers)


def _record(entry: Entry, problem: Problem, config: Config) -> Record | None:
    """Return the row's result, or None where it has no time."""
    seconds, flops = entry.seconds("time(us)"), entry.shifted("TFLOPS", 12)
    remark = _REMARK.match(entry.remark) if entry.remark else None
    if seconds is None and flops is None and remark:
        try:
            flops, us = float(remark["tflops"]) * 1e12, remark["us"]
            seconds = float(us) / 1e6 if us else None
        except ValueError:
            entry.fail(f"has a remark that can't be read: {shown(entry.remark)}")
    if seconds is None and flops:
        seconds = problem.flops / flops
    if not seconds:
        return None
    if not SECONDS.holds(seconds):
        entry.fail(f"takes {seconds:.3g} seconds by its TFLOPS or remark, not {SECONDS.words}; correct or remove them")
    fields: dict[str, Any] = {
        "target": entry.text("target"),
        "winner": entry.text("winner", config.backend),
        "seconds": seconds,
        "spread": entry.number("spread") or 0.0,
        "timer": entry.text("timer", "tune_gemm"),
        "error": entry.number("error", may_be_infinite=True),
        "tolerance": entry.number("tolerance"),
        "library_seconds": entry.seconds("library_us"),
        "library": entry.text("library"),
        "library_wrong": entry.text("library_wrong"),
        "tie": entry.flag("tie"),
        "verified": entry.text("verified"),
        "toolchain": entry.texts("toolchain"),
        "cold": entry.flag("cold"),
        "compute_units": entry.integer("compute_units", 0, 0),
        "m_from": entry.integer("M_from", 0, 0),
        "held_out": entry.plain("held_out") or {},
        "quantize_seconds": entry.seconds("quantize_us"),
        "code": entry.text("code"),
        "order": entry.text("order"),
        "row_bits": entry.text("row_bits"),
        "notes": entry.plain("notes") or {},
    }
    try:
        return Record(problem=problem, config=config, **fields)
    except InputError as error:
        entry.fail(f"can't be: {error}")


def make_row(record: Record) -> dict[str, Any]:
    """Return the values of a record's line, in the order of its keys; an InputError if it can't hold the scales."""
    problem, config = record.problem, record.config
    options = dict(config.options)
    row = _size_row(problem)
    row |= {key: getattr(config, name) for key, name in (*_BLOCKS.items(), *_COUNTS.items())}
    row |= {key: options.pop(name) for key, name in _OPTIONS.items() if name in options}
    if "NUM_SMS" in row and config.split_k == 1:
        del row["SPLIT_K"]  # tune_streamk's rows have the one instead of the other
    row |= {"TFLOPS": float(f"{record.tflops:.5g}"), "time(us)": _microseconds(record.seconds)}
    row |= _kind_row(problem)
    row |= {"template": config.template, "backend": config.backend, "options": options or None}
    row |= {"target": record.target, "compute_units": record.compute_units or None}
    row |= {"M_from": record.m_from or None, "held_out": dict(record.held_out) or None}
    row |= {"winner": record.winner, "timer": record.timer, "spread": record.spread}
    row |= {"error": record.error, "tolerance": record.tolerance, "library": record.library or None}
    row |= {"library_us": None if record.library_seconds is None else _microseconds(record.library_seconds)}
    row |= {"library_wrong": record.library_wrong or None}
    row |= {"quantize_us": None if record.quantize_seconds is None else _microseconds(record.quantize_seconds)}
    row |= {"tie": record.tie, "verified": record.verified, "cold": record.cold}
    row |= {"toolchain": dict(sorted(record.toolchain.items())), "code": record.code or None}
    row |= {"order": record.order or None, "row_bits": record.row_bits or None, "notes": dict(record.notes) or None}
    return {key: value for key, value in row.items() if value is not None}


def make_size(row: FormatRow) -> dict[str, Any]:
    """Return the values of a size's line, in the order of its keys; raises as `make_row`."""
    return _size_row(row.problem) | _kind_row(row.problem) | {"count": row.count}


def _size_row(problem: Problem) -> dict[str, Any]:
    row: dict[str, Any] = {"M": problem.m, "N": problem.n, "K": problem.k}
    return row | {"rowMajorA": problem.layout[0], "rowMajorB": problem.layout[1]}


def _kind_row(problem: Problem) -> dict[str, Any]:
    """Return the keys of a row for a problem beside its sizes and layouts."""
    row: dict[str, Any] = {f"dtype_{name}": getattr(problem, name).dtype for name in "abc"}
    row |= {"bias": problem.bias, "batch": problem.batch, "family": problem.family}
    row |= {"epilogue": problem.epilogue} if problem.epilogue != "none" else {}
    row |= {"order_b": problem.b.order} if problem.b.order != PLAIN else {}
    row |= {"scales": scales} if (scales := _scales(problem)) else {}
    row |= {"groups": problem.group_count} if problem.groups else {}
    return row | ({"shared": problem.shared} if problem.shared else {}) | groups_row(problem.groups)


def _scales(problem: Problem) -> str:
    """Return the name of a problem's scale factors; "" where its family has these first."""
    if problem.scalings == NO_SCALES:
        return ""
    family: Family = registry.get(Family, problem.family)
    pairs = family.scalings(problem.a.dtype, problem.b.dtype)
    if problem.scalings not in pairs:
        raise InputError(f"{problem.key} has scales that family {problem.family} does not have; a row can't hold them")
    return "" if problem.scalings == pairs[0] else granularity(problem.scalings)


def _microseconds(seconds: float) -> Decimal:
    """Return microseconds, shifted, not multiplied, so that they come back without rounding."""
    return Decimal(repr(seconds)).scaleb(6)
