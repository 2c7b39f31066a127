"""What most tests name: the data types, the errors, how plug-ins and targets are found, and types of fixtures."""

from typing import TypeAlias

import pytest

from tests.support import raising
from tests.support.refusals import fails, refuses
from tests.support.tables import apart, cases, each, heavy
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import (
    DamagedFileWarning,
    DriverError,
    InputError,
    OutputError,
    RemarkWarning,
    TargetError,
    TritonGemmError,
    UnavailableError,
    UntunableRowsWarning,
)
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.group_rows import Groups
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.core.protocol import MeasureProtocol, RaceResult
from tritongemm.core.record import Record
from tritongemm.core.scaling import Scaling
from tritongemm.core.served_call import CallSignature, LoadedKernel, PatchedLaunch, Resolution
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.formats import make_problem, results_format
from tritongemm.hip_ext.machine import Machine
from tritongemm.numerics import verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import (
    Backend,
    Evaluator,
    Family,
    Format,
    KernelBackend,
    LibraryBackend,
    ServerFormat,
    TunerFormat,
    WeightLayout,
    WritableFormat,
)
from tritongemm.search.space import space
from tritongemm.search_spaces import loader
from tritongemm.search_spaces.loader import load_target
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.system import settings
from tritongemm.workloads import sizes

Caplog: TypeAlias = pytest.LogCaptureFixture
Capsys: TypeAlias = pytest.CaptureFixture[str]
Patch: TypeAlias = pytest.MonkeyPatch

__all__ = [
    "BASELINE_ENTRY", "SUPPORTED", "Artifact", "ArtifactCache", "Backend", "Buffer", "BuildPool", "CallSignature",
    "Caplog", "Capsys", "CompileJob", "Config", "DamagedFileWarning", "Defaults", "Dispatcher", "DriverError",
    "Evaluator", "Family", "Format", "FormatRow", "Groups", "InputError", "KernelBackend", "Launch", "LibraryBackend",
    "LoadedKernel", "Machine", "MeasureProtocol", "Operand", "Operands", "OutputError", "Param", "Patch",
    "PatchedLaunch", "Problem", "RaceResult", "Record", "RemarkWarning", "Resolution", "Scaling", "SearchLimits",
    "ServerFormat", "Support", "Target", "TargetError", "Trial", "TritonGemmError", "TunerFormat", "UnavailableError",
    "UntunableRowsWarning", "WeightLayout", "WritableFormat", "apart", "cases", "each", "fails", "heavy", "load_target",
    "loader", "make_problem", "matrices", "raising", "refuses", "registry", "results_format", "settings", "sizes",
    "space", "verify",
]  # fmt: skip
