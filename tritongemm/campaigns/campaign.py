"""The class `Campaign`: a folder, the log it is of, and what the stages work with, among it what measures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from tritongemm.build.pool import BuildPool
from tritongemm.campaigns.log_file import LogFile
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.target import Target
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins.contracts import Evaluator
from tritongemm.tune.run import TuningRun

OpenEvaluator: TypeAlias = Callable[[], Evaluator]  # starts a new process on one device


@dataclass(frozen=True)
class MeasuringTools:
    """The tools that measure."""

    machine: Machine
    openers: Sequence[OpenEvaluator]
    pool: BuildPool
    protocol: MeasureProtocol


# Calls the function with the tools, or raises a TargetError where there is no GPU; closes them at the end.
OpenTools: TypeAlias = Callable[[str], AbstractContextManager[MeasuringTools]]


TUNED, MERGED = "tuned.yaml", "merged.yaml"  # results files of the stages `tune` and `merge`, in the folder

OpenEvaluators: TypeAlias = Callable[[], AbstractContextManager[Sequence[Evaluator]]]
# Takes the problems and the results file.
OpenRun: TypeAlias = Callable[[Sequence[Problem], Path], AbstractContextManager[TuningRun]]


@dataclass
class Campaign:
    """From a log of what a job called to kernels that measurably gained."""

    folder: Path  # of all its files
    log: Path | None  # what the job called; None where the folder has been made already
    threshold: float  # least share of the log's time, in percent, that a product must take to be tuned
    target: Target  # for which it tunes
    devices: tuple[int, ...]  # numbers of the GPUs, of this host or of a cluster; none where nothing can be measured
    say: Callable[[str], None]  # prints a line
    open_evaluators: OpenEvaluators  # what times products on each device, or stands in for that
    open_run: OpenRun  # a tuning run of some problems into a results file
    open_tools: OpenTools  # what the last stages measure with
    # What times depend on, such as versions and the clock.
    measured_with: Mapping[str, str] = field(default_factory=dict)
    tune_options: tuple[str, ...] = ()  # options with which `tritongemm tune` tunes one config as this campaign does
    others: tuple[Path, ...] = ()  # results files of other campaigns, merged into this one's
    resume: bool = True  # whether tuning goes on from what is there
    # What went wrong so far and did not end the campaign; it makes the exit status 1.
    failures: list[str] = field(default_factory=list)

    @cached_property
    def log_file(self) -> LogFile:
        """The log, which may come out of a pipe and is opened once."""
        if self.log is None:
            raise InputError("name the LOG that the configs are made of")
        return LogFile(self.log)

    @property
    def tuned(self) -> Path:
        """The results file of the stage `tune`, with its journal beside it."""
        return self.folder / TUNED

    @property
    def alone(self) -> Path:
        """The folder of results that the configs' own scripts write."""
        return self.folder / "alone"

    @property
    def taken_in(self) -> Path:
        """The folder of copies of other campaigns' results that are merged in."""
        return self.folder / "with"

    @property
    def merged(self) -> Path:
        """The results file of the stage `merge`."""
        return self.folder / MERGED

    def fail(self, text: str) -> None:
        """Print what went wrong, and note it in `failures`, so that the exit status becomes 1."""
        self.failures.append(text)
        self.say(text)
