"""Log: a command line for each call, of hipblaslt-bench (HIPBLASLT_LOG_MASK=32) or rocblas-bench (ROCBLAS_LAYER=2).

    hipblaslt-bench --api_method c -m 1024 -n 512 -k 1024 --lda 1024 … --compute_type f32_r --activation_type none
    ./rocblas-bench -f gemm_ex --transposeA T --transposeB N -m 17408 -n 2048 -k 5120 --alpha 1 --a_type f16_r …

What a command leaves out is at its default, as the libraries' own commands leave out little and people's much. One that
is cut could be taken for another call, so a command counts only where its line has an end, and where no word in it
stands without an option.
"""

import re
from functools import lru_cache
from typing import ClassVar

from tritongemm.campaigns.logs._fields import OTHERS, Fields, add_row, split_groups, write_into_c
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents, LogFault
from tritongemm.system.printable import printable

_COMMAND = re.compile(r"-bench(?=\s+-)")  # begins with plain text, so that other text is passed over quickly
_PROGRAMS = ("hipblaslt", "rocblas")
_VALUE = re.compile(r"[^-\s]\S*|-[0-9.]\S*")
_NAMES = {
    "m": "M", "n": "N", "k": "K", "sizem": "M", "sizen": "N", "sizek": "K",
    "transposeA": "transA", "transposeB": "transB", "precision": "r", "function": "f",
}  # fmt: skip
_FUNCTION = re.compile(r"gemm(?P<by_pointers>_batched)?(?:_strided_batched)?(?:_ex\d?)?(?:_64)?")
_LETTERS = {
    "h": "f16_r", "s": "f32_r", "d": "f64_r", "c": "f32_c", "z": "f64_c", "i8": "i8_r",
    "f16": "f16_r", "bf16": "bf16_r", "f32": "f32_r", "f64": "f64_r",
}  # fmt: skip
_CUT = "the command is cut: its line does not end; if it is complete, end the file with a new line"
_OF_RESULT = "c_type", "d_type"  # each defaults to the other
_TYPES = ("a_type", "b_type", *_OF_RESULT, "compute_type")
_PRECISIONS = {"hipblaslt": "f16_r", "rocblas": "f32_r"}  # the type where -r gives none
_SUMS = "f32_r"  # the compute_type of hipblaslt-bench, whatever -r is


class BenchCommands(CallLog):
    """The reader of command lines of the libraries' own benchmarks."""

    title: ClassVar[str] = "command lines of hipblaslt-bench (HIPBLASLT_LOG_MASK=32) or rocblas-bench (ROCBLAS_LAYER=2)"

    def read(self, text: str) -> LogContents:
        """Return a call for each command of a GEMM."""
        contents = LogContents()
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            places = list(_COMMAND.finditer(line)) if "-bench" in line else []
            for index, place in enumerate(places):
                last = index + 1 == len(places)
                end = len(line) if last else places[index + 1].start()
                program = next((name for name in _PROGRAMS if line.endswith(name, 0, place.start())), "")
                if not (last and line.endswith(("\n", "\r"))):
                    contents.faults.append(LogFault(number, _CUT))
                elif not program:
                    contents.faults.append(LogFault(number, "the command is cut: its beginning is not there"))
                else:
                    _add(contents, program, line[place.end() : end], number)
        return contents


def _add(contents: LogContents, program: str, text: str, line: int) -> None:
    found = _read_command(program, text)
    if isinstance(found, tuple):
        for fields, assumed in found:
            if add_row(contents, fields, line, f"{program}-bench"):
                contents.assumed.update(assumed)
    elif isinstance(found, LogFault):
        contents.faults.append(LogFault(line, found.reason))
    else:
        contents.others[found] += 1


@lru_cache(maxsize=1 << 14)
def _read_command(program: str, text: str) -> tuple[tuple[Fields, tuple[str, ...]], ...] | LogFault | str:
    """Return the fields of each product of a command, with the defaults that no word gives.

    Or what is wrong with the command, or the function that it is of if no product. Most lines of a log are equal.
    """
    pairs = _read_words(text.split())
    if isinstance(pairs, str):
        return LogFault(0, pairs)
    found = split_groups(pairs)
    if isinstance(found, str):
        return LogFault(0, f"the command {found}")
    function = dict(pairs).get("f", "gemm" if program == "rocblas" else "matmul")
    known = _FUNCTION.fullmatch(function)
    if program == "rocblas" and known is None:
        return function
    by_pointers = known is not None and bool(known["by_pointers"])
    return tuple(_completed(program, values, by_pointers) for values in found)


def _completed(program: str, values: dict[str, str], by_pointers: bool) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of a product, with defaults for what the command leaves out, and which those are."""
    if by_pointers:
        values[OTHERS] = "a batch by pointers"
    own = _LETTERS.get(values.get("r", ""), values.get("r", ""))
    defaults = {"transA": "N", "transB": "N"} | dict.fromkeys(_TYPES, own or _PRECISIONS[program])
    if program == "hipblaslt":
        defaults["compute_type"] = _SUMS
    if not values.keys().isdisjoint(_OF_RESULT):
        defaults = {name: value for name, value in defaults.items() if name not in _OF_RESULT}
    values |= {name: _LETTERS.get(values[name], values[name]) for name in _TYPES if name in values}
    said = values.keys() | (set(_TYPES) if own else set())
    assumed = tuple(f"{name} {value}" for name, value in defaults.items() if name not in said)
    return Fields(defaults | write_into_c(values)), assumed


def _read_words(words: list[str]) -> list[tuple[str, str]] | str:
    """Return the values of options by the names of the profile's fields, in their order, or what is wrong."""
    pairs: list[tuple[str, str]] = []
    awaits_value = False
    for word in words:
        if not _VALUE.fullmatch(word):
            name = word.lstrip("-")
            pairs.append((_NAMES.get(name, name), "true"))
            awaits_value = True
        elif awaits_value:
            pairs[-1] = pairs[-1][0], word
            awaits_value = False
        else:
            return f"the command holds {printable(word, 60)!r}, which belongs to no option"
    return pairs
