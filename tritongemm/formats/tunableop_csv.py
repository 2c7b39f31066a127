"""Format: the CSV files of PyTorch's TunableOp, the products that a program called and the algorithms that it chose.

A line is ``operation,parameters`` (a product that was recorded) or ``operation,parameters,solution,ms`` (one that was
tuned); lines ``Validator,NAME,VALUE`` before them name the versions that made the file. PyTorch writes sizes as the
libraries, column-major, see them: the first is our N, the second our M, and their A is our B.

    GemmTunableOp_BFloat16_TN,tn_6144_16_4096_ld_4096_4096_6144,Gemm_Hipblaslt_1219,0.031

TunableOp chooses among PyTorch's own algorithms. A file can hold results that PyTorch's choice won (Default),
and algorithms of the hipBLASLt whose version the file names.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._rows import FULL_FLOAT32, KeptError, RowFaults, baseline_won, by_device, make_problem
from tritongemm.plugins.contracts import WritableFormat
from tritongemm.search_spaces.loader import target_of_device
from tritongemm.system.printable import printable

_OPERATION = re.compile(r"(?P<kind>\w*)TunableOp_(?P<types>.+)_(?P<layout>[NT]{2})", re.ASCII)
_PARAMETERS = re.compile(
    r"(?P<b>[nt])(?P<a>[nt])_(?P<n>[0-9]{1,10})_(?P<m>[0-9]{1,10})_(?P<k>[0-9]{1,10})(?:_B_(?P<batch>[0-9]{1,10}))?"
    r"(?:_ld_(?P<lead_b>[0-9]{1,19})_(?P<lead_a>[0-9]{1,19})_(?P<lead_c>[0-9]{1,19}))?(?:_rw_(?P<rowwise>[01])_bias_(?P<bias>\w{1,40}))?",
    re.ASCII,
)
_VALIDATOR = "Validator"
_CALLS = {"Gemm": "mm", "GemmAndBias": "addmm", "GemmStridedBatched": "bmm", "ScaledGemm": "scaled_mm"}
_DTYPES = {
    "tf32": "fp32", "float": "fp32", "BFloat16": "bf16", "Half": "fp16", "Float8_e4m3fn": "fp8e4m3fn",
    "Float8_e5m2": "fp8e5m2", "Float8_e4m3fnuz": "fp8e4m3fnuz", "Float8_e5m2fnuz": "fp8e5m2fnuz",
}  # fmt: skip
_TYPE = re.compile("_(" + "|".join(sorted(_DTYPES, key=len, reverse=True)) + ")(?=_|$)")
_WRITABLE = {"bf16": "BFloat16", "fp16": "Half"}
_FULL = "float"  # float32 products without rounding, where C has that name too
_DEFAULT = "Default"
_PARAMETERS_OF_BLAS = "- {"  # PYTORCH_TUNABLEOP_BLAS_LOG adds them to a recorded product
_VERSION = re.compile(
    r"(?:(?P<major>[0-9]{1,4})\.(?P<minor>[0-9]{1,3})\.(?P<patch>[0-9]{1,2})|(?P<number>[0-9]{1,9}))"
    r"-(?P<revision>[0-9a-f]{1,8}).*"
)


@dataclass(frozen=True)
class _Line:
    """One line that is not blank."""

    number: int
    text: str

    @property
    def fields(self) -> list[str]:
        """The text between its commas."""
        return self.text.split(",")

    @property
    def is_validator(self) -> bool:
        """Whether it is a version's line."""
        return self.text.startswith(f"{_VALIDATOR},")


class TunableOpCsv(WritableFormat):
    """TunableOp's files of recorded and of tuned products."""

    title = "a CSV of PyTorch's TunableOp, op,params or op,params,solution,ms"
    suffixes = (".csv",)

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether the first line that is not blank is one of TunableOp's; of a new file, its name."""
        if not text.strip():
            return path.name.startswith("tunableop_") and path.suffix in self.suffixes
        first = next(_lines(text), _Line(0, ""))
        return first.is_validator or _OPERATION.fullmatch(first.fields[0]) is not None

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a size for each product, in the order of the file; one that is recorded twice counts twice."""
        rows, faults = dict[Problem, FormatRow](), RowFaults(path)
        target = target_of_device(_validators(text).get("GCN_ARCH_NAME", ""))
        for number, line in enumerate(_lines(text), start=1):
            with faults.of_row(number, line.number):
                found = _read_line(line)
                if found is None:
                    continue
                problem, operation = found
                row = FormatRow(problem, line=line.number, number=number, target=target, operation=operation)
                known = rows.setdefault(problem, row)
                if known is not row:
                    rows[problem] = replace(known, count=known.count + 1)
        return faults.beside(rows.values())

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return a file that TunableOp wrote, with the solutions of these results; all other bytes stay."""
        text = before.get("", "")
        validators = _validators(text)
        places, written, omitted = _places(text), dict[Problem, tuple[str, float]](), list[tuple[Record, str]]()
        for rivals in by_device(records):
            best, problem = rivals[0], rivals[0].problem
            solutions = [_solution(record, validators) for record in rivals]
            known = next((one for one in solutions if not isinstance(one, Support)), None)
            if problem in written:
                omitted.append((best, "a result of another device of the same target is written"))
            elif known is None:
                omitted.append((best, str(solutions[0])))
            elif not (places.get(problem) or _names(problem)):
                omitted.append((best, "what TunableOp calls this product is not known"))
            else:
                written[problem] = known
                if isinstance(solutions[0], Support):
                    omitted.append((best, f"{solutions[0]}; {known[0]} stands for it"))
        return Translation({"": _with_solutions(text, places, written)} if text else {}, len(written), tuple(omitted))


def _lines(text: str) -> Iterator[_Line]:
    return (_Line(n, line.rstrip("\r\n")) for n, line in enumerate(text.split("\n"), start=1) if line.strip())


def _validators(text: str) -> dict[str, str]:
    """Return the versions by their names."""
    pairs = (line.text.split(",", 2)[1:] for line in _lines(text) if line.is_validator)
    return {pair[0]: pair[1] for pair in pairs if len(pair) > 1}


def _read_line(line: _Line) -> tuple[Problem, str] | None:
    """Return the product of a line and what is called for it; None for a version."""
    fields = line.fields
    if line.is_validator:
        if len(fields) < 3:
            raise InputError(f"has no value: {_shown(line.text)}; it must be Validator,NAME,VALUE")
        return None
    operation = _OPERATION.fullmatch(fields[0])
    if not operation:
        raise InputError(f"op must be an operation such as GemmTunableOp_BFloat16_TN, not {_shown(fields[0])}")
    if len(fields) < 2:
        raise InputError(f"has no params: {_shown(line.text)}; it must be op,params or op,params,solution,ms")
    if len(fields) > 3 and not fields[2].startswith(_PARAMETERS_OF_BLAS) and not _is_time(fields[3]):
        raise InputError(f"ms must be milliseconds, not {_shown(fields[3])}")
    if operation["kind"] not in _CALLS:
        raise KeptError(f"there is no operation {_shown(fields[0])} here")
    parameters = _PARAMETERS.fullmatch(fields[1])
    if not parameters or operation["layout"].lower() != parameters["b"] + parameters["a"]:
        example = "tn_6144_16_4096_ld_4096_4096_6144"
        raise InputError(f"params must be those of {_shown(fields[0])}, such as {example}, not {_shown(fields[1])}")
    given = _given(operation["kind"], _types(operation["types"]), parameters)
    if operation["types"] == _FULL:
        raise KeptError(FULL_FLOAT32)
    m, n, k = (int(parameters[name]) for name in "mnk")
    problem = make_problem(Defaults(), m, n, k, given)
    _require_dense(problem, parameters)
    return problem, _CALLS[operation["kind"]]


def _require_dense(problem: Problem, parameters: re.Match[str]) -> None:
    """Refuse operands that are parts of larger ones; where there is one column only, nothing steps to the next."""
    p, (lead_a, lead_b, lead_c) = problem, problem.leads
    columns = {"A": p.k if p.b.row_major else p.n, "B": p.m if p.a.row_major else p.k, "C": p.m}
    for name, ours, rows in (("A", "b", lead_b), ("B", "a", lead_a), ("C", "c", lead_c)):
        lead = int(parameters[f"lead_{ours}"] or rows)
        if lead != rows and columns[name] > 1:
            raise KeptError(f"the columns of {name} are {lead} elements apart, of which it has {rows}")


def _shown(text: str) -> str:
    return printable(repr(text), 80)


def _is_time(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _types(words: str) -> list[str]:
    """Return our dtypes that an operation names."""
    found = _TYPE.findall(f"_{words}")
    if "_".join(found) != words:
        raise KeptError(f"{_shown(words)} has a dtype that is not supported")
    return [_DTYPES[word] for word in found]


def _given(kind: str, types: list[str], parameters: re.Match[str]) -> dict[str, Any]:
    """Return what a line says of its product beside M, N and K, as fields of `Problem`."""
    scaled, biased = kind == "ScaledGemm", kind == "GemmAndBias"
    if len(types) != (3 if scaled else 1) or bool(parameters["rowwise"]) > scaled:
        raise InputError(f"op and params do not belong together: {len(types)} dtypes and {_shown(parameters[0])}")
    if bool(parameters["batch"]) != (kind == "GemmStridedBatched"):
        raise InputError(f"params must name a batch where op is one of batches alone, not {_shown(parameters[0])}")
    if scaled and not parameters["rowwise"]:
        raise KeptError("it does not say what its scales are of, as lines with _rw_0 or _rw_1 do")
    biased = biased or (parameters["bias"] or "None") != "None"
    a, b, c = types if scaled else types * 3
    return {
        "family": "a8w8" if scaled else DEFAULT_FAMILY,
        "dtype_a": a,
        "dtype_b": b,
        "dtype_c": c,
        "row_major_a": parameters["a"] == "n",
        "row_major_b": parameters["b"] == "n",
        "bias": "n" if biased else "none",
        "batch": int(parameters["batch"] or 1),
        "order_b": PLAIN,
        "scales": "tensor" if parameters["rowwise"] == "0" else "",
    }


def _places(text: str) -> dict[Problem, list[int]]:
    """Return the indices of the lines of each product."""
    found: dict[Problem, list[int]] = {}
    for line in _lines(text):
        try:
            product = _read_line(line)
        except (KeptError, InputError):
            continue
        if product:
            found.setdefault(product[0], []).append(line.number - 1)
    return found


def _solution(record: Record, validators: Mapping[str, str]) -> tuple[str, float] | Support:
    """Return TunableOp's name of the winner and its time in milliseconds, or why it has none."""
    config = record.config
    if "PT_VERSION" not in validators:
        return Support("the file lacks the versions that TunableOp checks; let TunableOp write it first")
    target = target_of_device(validators.get("GCN_ARCH_NAME", ""))
    if target and target != record.target:
        return Support(f"the file is of {target}, not {record.target}")
    if record.predicted:
        return Support("its time is a prediction, which no timer measured")
    if baseline_won(record):
        return _DEFAULT, 1e3 * (record.library_seconds or record.seconds)
    if record.winner != config.backend or config.is_generated:
        return Support(f"{printable(record.winner)} won, which TunableOp can't run")
    # No other library's algorithms have such a version.
    if _number(validators.get("HIPBLASLT_VERSION", "")) != config.option("version", -1):
        return Support(f"{config.name} won, which is no algorithm of the hipBLASLt that the file names")
    return f"Gemm_Hipblaslt_{config.option('index')}", 1e3 * record.seconds


def _number(version: str) -> int | None:
    """Return our number of a version of hipBLASLt, which TunableOp writes as 0.8.0-bf2c3184 or 800-bf2c3184."""
    match = _VERSION.fullmatch(version)
    if not match:
        return None
    number = int(match["number"] or 0)
    if match["major"]:
        number = int(match["major"]) * 100000 + int(match["minor"]) * 100 + int(match["patch"])
    return (number << 32) + int(match["revision"], 16)


def _names(problem: Problem) -> list[str]:
    """Return the operation and parameters of a dense product; none where TunableOp's are not known."""
    m, n, k = problem.m, problem.n, problem.k
    dtype = _WRITABLE.get(problem.a.dtype)
    kind = "GemmStridedBatched" if problem.batch > 1 else "GemmAndBias" if problem.bias == "n" else "Gemm"
    layout = ("N" if problem.b.row_major else "T") + ("N" if problem.a.row_major else "T")
    batch = f"_B_{problem.batch}" if problem.batch > 1 else ""
    lead_a, lead_b, lead_c = problem.leads
    names = [f"{kind}TunableOp_{dtype}_{layout}", f"{layout.lower()}_{n}_{m}_{k}{batch}_ld_{lead_b}_{lead_a}_{lead_c}"]
    parsed = _read_line(_Line(1, ",".join(names))) if dtype else None
    return names if parsed and parsed[0] == problem else []


def _with_solutions(
    text: str, places: Mapping[Problem, Sequence[int]], written: Mapping[Problem, tuple[str, float]]
) -> str:
    """Return the text of a file with solutions and their milliseconds; lines that have them stay."""
    lines = text.split("\n")
    ending, end = lines.pop() if not lines[-1] else None, "\r" if lines[0].endswith("\r") else ""
    for problem, (solution, milliseconds) in written.items():
        for place in places.get(problem, ()):
            fields = lines[place].rstrip("\r").split(",")
            if fields[2:3] != [solution]:
                lines[place] = ",".join([*fields[:2], solution, f"{milliseconds:.6g}"]) + end
        if problem not in places:
            lines.append(",".join([*_names(problem), solution, f"{milliseconds:.6g}"]) + end)
    return "\n".join(lines if ending is None else [*lines, ending])
