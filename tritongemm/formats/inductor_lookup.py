"""Format: the lookup table of torch.compile's Inductor as JSON, a list of template configs for each product.

A key names the operands' dtypes, sizes and strides, the scalars and the operation, as torch 2.13 writes it:

    ((torch.bfloat16, [16, 4096], [4096, 1]), (torch.bfloat16, [4096, 6144], [1, 4096]))+mm

A device's name and a ``+`` may stand before it. ``torch._inductor.config.lookup_table.table`` takes what the file
holds, where ``torch._inductor.lookup_table.LookupTableChoices`` makes the choices; where a key is missing Inductor
chooses as it does without a table. Keys are written without a device, so a file is of one target.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.dtypes import dtype
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._json_members import Member, read_integer, read_members, with_members
from tritongemm.formats._rows import KeptError, RowFaults, baseline_won, by_device, make_problem
from tritongemm.plugins.contracts import WritableFormat
from tritongemm.search_spaces.loader import target_of_device
from tritongemm.system.printable import printable

_PAIR = r"\[([0-9]{1,10}), ([0-9]{1,10})\]"
_OPERAND = re.compile(rf"\(torch\.(\w{{1,30}}), {_PAIR}, {_PAIR}\)", re.ASCII)
_KEY = re.compile(
    r"(?:(?P<device>[^(]{1,200})\+)?\((?P<operands>\(torch\..{1,400}\))\)(?:\+(?P<scalars>[\w=&.-]{1,200}))?"
    r"\+(?P<operation>\w{1,40})"
)
_TEMPLATE, _THEIR_TEMPLATE = "tile", "triton::mm"  # both a program for each tile
_LIBRARY = {"template_id": "aten::mm"}
_SCALARS = {"mm": "", "addmm": "alpha=1&beta=1"}
_FIELDS = {
    "BLOCK_M": "block_m", "BLOCK_N": "block_n", "BLOCK_K": "block_k", "GROUP_M": "group_m", "num_warps": "num_warps",
    "num_stages": "num_stages",
}  # fmt: skip
_ORDERS = ((True, False), (True, True), (False, False), (False, True))  # where a size of one leaves several, the first
_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


class InductorLookup(WritableFormat):
    """Inductor's lookup table of matrix products."""

    title = "a lookup table of PyTorch's Inductor as JSON"
    suffixes = (".json",)

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether the first key of a JSON object is one of Inductor's."""
        first = re.match(r'\s*\{\s*"([^"]{0,1000})"', text)
        return first is not None and _KEY.fullmatch(first[1]) is not None

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a row for each product, in the order of the file, with its first config of the plain template."""
        rows, faults = list[FormatRow](), RowFaults(path)
        seen: dict[str, int] = {}
        for number, member in enumerate(read_members(path, text), start=1):
            with faults.of_row(number, member.line, repr(printable(member.key, 120))):
                if seen.setdefault(member.key, number) != number:
                    raise InputError(f"repeats row {seen[member.key]}; keep one of them")
                problem, device = _read_key(member.key)
                config = _read_configs(member.value)
                target = target_of_device(device)
                rows.append(FormatRow(problem, config, line=member.line, number=number, target=target))
        return faults.beside(rows)

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return a table with these results; its other rows stay byte for byte."""
        text = before.get("", "")
        members = read_members(Path("the table"), text) if text else []
        values, written, omitted = dict[str, Any](), list[Record](), list[tuple[Record, str]]()
        for record, *_ in by_device(records):
            key, config = key_of(record.problem), _config_of(record)
            if not key:
                reason = "Inductor looks up mm and addmm of dense operands of one dtype alone"
            elif written and record.target != written[0].target:
                reason = f"a table is of one target, and this one is of {written[0].target}"
            elif isinstance(config, Support):
                reason = str(config)
            elif key in values:
                reason = "a result of another device of the same target is written"
            else:
                written.append(record)
                values[key] = [config]
                continue
            omitted.append((record, reason))
        changed = {key: value for key, value in values.items() if not _means(members, key, value)}
        new = with_members(text, members, changed) if changed else text
        return Translation({"": new} if new else {}, len(written), tuple(omitted))


def key_of(problem: Problem) -> str:
    """Return Inductor's key of a product, without a device; "" where it looks none up.

    A bias is one for each column; Inductor sees it stretched over the rows.
    """
    m, n, k, name = problem.m, problem.n, problem.k, problem.a.dtype
    dense = Problem(
        m, n, k, *matrices(name, layout="NT"[problem.a.row_major] + "NT"[problem.b.row_major]), bias=problem.bias
    )
    if problem != dense or problem.bias == "m":
        return ""
    lead_a, lead_b, _ = problem.leads
    a = ([m, k], [lead_a, 1] if problem.a.row_major else [1, lead_a])
    b = ([k, n], [lead_b, 1] if problem.b.row_major else [1, lead_b])
    bias = [([m, n], [0, 1])] if problem.bias == "n" else []
    operands = ", ".join(f"(torch.{problem.a.type.torch}, {size}, {strides})" for size, strides in (*bias, a, b))
    operation = "addmm" if bias else "mm"
    return "+".join(part for part in (f"({operands})", _SCALARS[operation], operation) if part)


def _read_key(key: str) -> tuple[Problem, str]:
    """Return the product of a key, and the name of the device."""
    match = _KEY.fullmatch(key)
    if not match:
        raise InputError("is no key of Inductor's, such as ((torch.bfloat16, [..], [..]), ...)+mm")
    operation, operands = match["operation"], _OPERAND.findall(match["operands"])
    if operation not in _SCALARS or (match["scalars"] or "") != _SCALARS[operation]:
        raise KeptError(f"{printable(operation)} with {printable(match['scalars'] or 'no scalars')} is not tuned here")
    if len(operands) != 2 + (operation == "addmm"):
        raise InputError(f"must name the dtype, size and strides of each operand of {operation}")
    (_, m, k, *_), (_, _, n, *_) = operands[-2:]
    try:
        name = dtype(operands[0][0]).name
    except InputError as error:
        raise KeptError(str(error)) from None
    given: dict[str, Any] = {"dtype_a": name, "dtype_b": name, "dtype_c": name}
    given |= {"family": DEFAULT_FAMILY, "order_b": PLAIN, "bias": "n" if operation == "addmm" else "none"}
    dense = make_problem(Defaults(), int(m), int(n), int(k), given)
    orders = (dense.stored(a, b) for a, b in _ORDERS)
    problem = next((one for one in orders if key.endswith(key_of(one))), None)
    if problem is None:
        raise KeptError("its operands have other dtypes or strides than dense ones")
    return problem, match["device"] or ""


def _read_configs(value: Any) -> Config | None:
    """Return the first config of the plain template; None where there are others alone."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and "template_id" in one for one in value):
        raise InputError("must be a list of objects with a template_id")
    ours = next((one for one in value if one["template_id"] == _THEIR_TEMPLATE), None)
    if ours is None:
        return None
    numbers: dict[str, Any] = {name: read_integer(ours, key, 1) for key, name in _FIELDS.items()}
    options = {name: read_integer(ours, name, 0) for name in _OPTIONS if name in ours}
    return Config(_TEMPLATE, **numbers, options=tuple(options.items()))


def _config_of(record: Record) -> dict[str, Any] | Support:
    """Return a result's entry in a table, or why it has none."""
    config, problem = record.config, record.problem
    if record.predicted:
        return Support("its time is a prediction, which no timer measured")
    if problem.bias == "none" and baseline_won(record):
        return _LIBRARY
    if record.winner != config.backend:
        return Support(f"{printable(record.winner)} won, and what Inductor races itself stays")
    row: dict[str, Any] = {"template_id": _THEIR_TEMPLATE}
    row |= {key: getattr(config, name) for key, name in _FIELDS.items()}
    row |= {name: config.option(name) for name in _OPTIONS if name in dict(config.options)}
    if not config.is_generated or _read_configs([row]) != config:
        return Support(f"{config.name} won, which is not Inductor's template, or more than a row holds")
    # Inductor would use a config of its own, with another BLOCK_K.
    return {**row, "EVEN_K": problem.k % config.block_k == 0}


def _means(members: Iterable[Member], key: str, value: list[dict[str, Any]]) -> bool:
    """Return whether an existing row begins with the same config."""
    now = next((member.value for member in members if member.key == key), None)
    return isinstance(now, list) and now[:1] == value
