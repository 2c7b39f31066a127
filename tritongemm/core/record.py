"""The class `Record`, which is the result of tuning one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from tritongemm.core import values
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import PREDICTED

# Number of the form in which journals and results files are written. A new key of a result raises it: a reader refuses
# keys that it does not know.
SCHEMA = 2

# Fields that are not written at their defaults.
_LEFT_OUT = (
    "compute_units", "m_from", "held_out", "quantize_seconds", "code", "library_wrong", "order", "row_bits", "notes",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """The result of tuning one problem.

    Raises:
        InputError: a value is not of its field's kind, or out of range.
    """

    problem: Problem  # what was tuned
    target: values.Text  # name of the target it was tuned for
    config: Config  # the best generated kernel
    winner: values.Text  # backend that dispatch should call, e.g. `triton`, or `torch` where the library won
    seconds: Annotated[float, values.SECONDS]  # median time of one launch of `config`, in seconds
    spread: Annotated[
        float, values.FINITE
    ]  # half the distance between the quartiles of its samples, relative to the median
    timer: values.Text  # clock; `model` marks a prediction
    # error, tolerance: deviation from the reference, and the largest allowed
    error: values.Deviation = None
    tolerance: values.FiniteOrNone = None
    # The library's median time in the same run, in seconds; None when not measured.
    library_seconds: values.SecondsOrNone = None
    library: values.Text = ""  # which library that was
    tie: values.Flag = False  # the two were within the noise of each other
    verified: values.Text = ""  # how the result was checked
    # Versions that made it, e.g. `{"triton": "3.6.0"}`.
    toolchain: Annotated[dict[str, str], values.TEXTS] = field(default_factory=dict)
    cold: values.Flag = True  # the weights were not in the last-level cache
    # Number of compute units of the device it was tuned on; 0 where that is not said, and the result then serves any
    # device of its target.
    compute_units: values.Natural = 0
    # The result serves every M from this one up to the problem's own, as a table over M says; 0 where it serves its own
    # M alone.
    m_from: values.Natural = 0
    # What was measured at other M of the range, which had no part in choosing it, by M as text: the time over the best
    # known there, less 1, and the library's time over it.
    held_out: Annotated[Mapping[str, Any], values.HELD_OUT] = field(default_factory=dict)
    # Median time in which A is quantised from bf16, with its scale factors in the problem's layout, as
    # `tritongemm.quantize` does; None where that was not measured, or the problem's A has no scale factors.
    quantize_seconds: values.SecondsOrNone = None
    # SHA-256 of the code object of `config` that was measured; "" where that is not known, or it has none.
    code: values.Text = ""
    # The error and the tolerance of the library whose result was wrong, so that it did not race; "" where it was right,
    # or was not compared.
    library_wrong: values.Text = ""
    # The reduction order of `config`, in which all rows of its product add up, at every M; "" where it was not asked
    # for.
    order: values.Text = ""
    # Hash of a row that `config` computed of operands that are the same at every M; "" without an order.
    row_bits: values.Text = ""
    # What a file's format or a campaign keeps with the result, by its own name, such as another tool's name of the
    # kernel; they are written back, and do not count when records are compared.
    notes: Annotated[Mapping[str, Any], values.MAP] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        values.require(self.__dict__, _FIELD_KINDS)
        if self.m_from > self.problem.m:
            raise InputError(f"m_from must be at most M, {self.problem.m}, not {self.m_from}")

    def serves(self, m: int) -> bool:
        """Say whether the result serves its problem at this M."""
        return m == self.problem.m or 0 < self.m_from <= m <= self.problem.m

    @property
    def predicted(self) -> bool:
        """Whether its times are a model's predictions, which no timer measured."""
        return self.timer == PREDICTED

    @property
    def served_seconds(self) -> float:
        """The time of the kernel that dispatch calls, in seconds: the library's if it won."""
        is_library = self.winner == self.library and self.library_seconds is not None
        return self.library_seconds or self.seconds if is_library else self.seconds

    @property
    def seconds_with_quantization(self) -> float | None:
        """The time of the called kernel plus the quantisation of A, in seconds; None if that was not measured."""
        return None if self.quantize_seconds is None else self.served_seconds + self.quantize_seconds

    @property
    def library_fault(self) -> str:
        """The size, and how wrong which version of the library is there; "" where it is not known to be."""
        version = self.toolchain.get(self.library, "")
        return f"{self.problem.key} ({self.library} {version}: {self.library_wrong})" if self.library_wrong else ""

    @property
    def tflops(self) -> float:
        """Rate in 10**12 operations per second."""
        return self.problem.flops / self.seconds / 1e12

    @property
    def gbps(self) -> float:
        """Rate in 10**9 bytes per second, where every operand passes through memory once."""
        return self.problem.bytes / self.seconds / 1e9

    @property
    def speedup(self) -> float | None:
        """The library's time over the result's."""
        return None if self.library_seconds is None else self.library_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, in their order."""
        data = {k: v for k, v in self.__dict__.items() if v or k not in _LEFT_OUT}
        return {**data, "problem": self.problem.to_json(), "config": self.config.name}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], problem: Problem | None = None) -> Record:
        """Return the record that `to_json` made.

        Wrong or unknown values raise an InputError, missing ones a KeyError or TypeError.
        """
        if unknown := data.keys() - {f.name for f in fields(cls)}:
            raise InputError(f"has unknown keys: {', '.join(sorted(unknown))}")
        read = {"problem": problem or Problem.from_json(data["problem"]), "config": values.read_config(data["config"])}
        return cls(**{**data, **read})


_FIELD_KINDS = values.kinds_of(Record)
