"""The contract of every kind of plug-in.

A plug-in is a class in a file (or a folder with backend.py) of its kind's package, found by the file's name. It derives
from its kind's class here and fills the methods that begin with an underscore; the public methods are final, check what
they are given and call those. A class that leaves an abstract method out is refused when it is defined. docs/plugins
has a page for each kind with a short example.

Plugin
├── Backend                 a source of GEMM kernels
│   ├── KernelBackend       whose kernels are compiled here, from text, code objects or instances of a library
│   │   └── SearchedBackend     whose kernels come from templates with a search space
│   └── LibraryBackend      a library that is asked on its GPU for its algorithms
├── Family                  what is computed: operands, inputs, reference, tolerance
├── WeightLayout            an order of B in memory
├── ScaleLayout             an order of scale factors in memory
├── Timer                   a clock
├── Strategy                a search
├── Format                  a file format
│   └── ResultsFormat           that in which our own results are kept
├── CallLog                 lines of a library's log that tell what it was asked for
└── KernelSource            who may serve a call at run time
Evaluator                   what times and verifies candidates: a GPU, or what stands in for one
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, final

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.dtypes import DType
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import Defaults, FormatRow, Merged, NamedKernel, NewerRow, ResultsFile, Translation
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.logged_call import LogContents
from tritongemm.core.operands import Operands
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.scaling import NO_SCALES, ScalePair, choose_pair, granularity
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.search_results import Predictions, Pruned
from tritongemm.core.serving import CallSignature, LoadedKernel, Resolution
from tritongemm.core.space import Space
from tritongemm.core.stride_places import StridePlaces
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial

if TYPE_CHECKING:
    from torch import Tensor

Search: TypeAlias = Generator[list[Config], list[Trial], None]  # yields batches of configs, and is sent their trials


class Plugin(ABC):  # noqa: B024 (kinds have the abstract methods)
    """What every plug-in has.

    Attributes:
        package: where plug-ins of this kind lie.
        kind: what messages call one.
        name: the file's name; the registry sets it.
        aliases: other names that a command line or a file may use.
    """

    package: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    name: str = ""
    aliases: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Refuse a plug-in that leaves something out.

        Raises:
            TypeError: names the methods and attributes that are missing.
        """
        super().__init_subclass__(**more)
        if abstract:
            return
        members = {name: getattr(cls, name, None) for name in dir(cls)}
        missing = [name for name, member in members.items() if getattr(member, "__isabstractmethod__", False)]
        missing += [name for name in _declared(cls) if name not in members]
        if missing:
            where = f"{cls.__module__}.{cls.__qualname__}"
            raise TypeError(
                f"{where} is no {cls.kind} plug-in yet: it lacks {', '.join(sorted(missing))} (docs/plugins)"
            )

    def available(self) -> Support:
        """Whether this machine has what the plug-in needs."""
        return SUPPORTED


def _declared(cls: type) -> Iterator[str]:
    """Names of the class variables that bases declare without a value: a plug-in must give them one."""
    for base in cls.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if "ClassVar" in str(annotation) and not any(name in vars(b) for b in cls.__mro__):
                yield name


# --- Backends ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """What a backend's kernels can compute at all; an empty tuple of architectures is all of them.

    Attributes:
        archs: names of the targets.
        kinds: of `Problem.kind`.
        orders_b: orders of B in memory.
        scales: where its kernels can apply scale factors: ``epilogue``, ``mainloop``.
        tensor_scales: whether their epilogue takes one factor for all of A, and for all of B.
    """

    archs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("one",)
    orders_b: tuple[str, ...] = (PLAIN,)
    scales: tuple[str, ...] = ()
    tensor_scales: bool = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Whether a problem is of a kind that these kernels compute."""
        if self.archs and target.name not in self.archs:
            return Support(f"its kernels are for {' and '.join(self.archs)}, not {target.name}")
        if problem.kind not in self.kinds:
            return Support(f"it computes {' or '.join(self.kinds)} GEMM at a time, not {problem.kind} ones")
        if problem.order_b not in self.orders_b:
            return Support(f"it reads B in the order {' or '.join(self.orders_b)}, not {problem.order_b}")
        for spec in problem.extras:
            if spec.scaling is not None and spec.applied not in self.scales:
                return Support(f"its kernels can't apply {spec.name} in the {spec.applied}")
            if spec.single and not self.tensor_scales:
                return Support(f"its kernels take a {spec.name} for each row, not one for all")
        return SUPPORTED


@dataclass(frozen=True)
class BuildInputs:
    """Files that compiling may need beside the config.

    Attributes:
        manifests: files that list kernels; empty for those that the environment names.
    """

    manifests: tuple[Path, ...] = ()


NO_INPUTS = BuildInputs()


class Backend(Plugin, abstract=True):
    """A source of GEMM kernels.

    Attributes:
        summary: one line for ``--help``.
        capabilities: what its kernels can compute at all.
        baseline: it is what users run today, which every race is measured against.
        compile_limit_s: seconds that one compile may take; 0 for the run's ``--timeout``. A backend with a limit of its
            own races only where it is asked for, and compiles in the background if its kernels are compiled here.
        named_only: it races only where its name is given, or a server is that its kernels are of; never for ``all``.
    """

    package = "tritongemm.backends"
    kind = "backend"
    summary: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    baseline: ClassVar[bool] = False
    compile_limit_s: ClassVar[float] = 0.0
    named_only: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name

    def named_kernel(self, config: Config | None) -> NamedKernel | None:
        """What files of other tools call a kernel; None where no other tool can run it.

        Args:
            config: one of this backend's; None for what it chooses by itself.
        """
        return None

    def config_of(self, kernel: NamedKernel) -> Config | None:
        """The config of a kernel that another tool's file names; None where that can't be told."""
        return None

    @final
    def supports(self, problem: Problem, target: Target) -> Support:
        """Whether it has a kernel for a problem on a target; the reason names the number or type that decides it."""
        return self.capabilities.supports(problem, target) and self._supports(problem, target)

    def _supports(self, problem: Problem, target: Target) -> Support:
        """As `supports`, of what `capabilities` do not say."""
        return SUPPORTED

    @final
    def check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS) -> Support:
        """Whether a config, wherever it comes from, can compute a problem on a target.

        It is asked of every config before anything is compiled or launched, and whatever numbers the config holds, the
        answer is a reason rather than an exception.

        Args:
            config: one of this backend.
            problem: what it should compute.
            target: the GPU that it should run on.
            inputs: files that kernels are listed in.

        Raises:
            InputError: the config is another backend's.
        """
        _own(self, [config])
        try:
            return self.supports(problem, target) and self._check(config, problem, target, inputs)
        except TritonGemmError as error:
            return Support(str(error))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers that nothing foresaw
            return Support(f"its numbers fit no kernel of {self.name} ({type(error).__name__}: {error})")

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return SUPPORTED


class KernelBackend(Backend, abstract=True):
    """A backend whose kernels are compiled here.

    Attributes:
        has_plans: its launches can be written as launch plans.
        has_manifest_rows: `manifest_row` tells of its kernels.
    """

    has_plans: ClassVar[bool] = True
    has_manifest_rows: ClassVar[bool] = False

    @final
    def candidates(
        self, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS, everything: bool = False
    ) -> list[Config]:
        """Configs to try, the most promising first; empty where it has none for the problem.

        Args:
            problem: sizes, dtypes and layouts.
            target: the GPU's architecture.
            inputs: files to look into.
            everything: all it has, not only what a tuning run tries by default.

        Raises:
            InputError: a file that lists kernels is wrong.
        """
        if not self.supports(problem, target):
            return []
        found = list(self._candidates(problem, target, inputs, everything))
        _own(self, found)
        return found

    @abstractmethod
    def _candidates(
        self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool
    ) -> Iterable[Config]: ...

    @final
    def has_candidates(self, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS) -> Support:
        """Whether `candidates` has any, or why it has none.

        Raises:
            InputError: a file that lists kernels is wrong.
        """
        return self.supports(problem, target) and self._has_candidates(problem, target, inputs)

    def _has_candidates(self, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        any_left = any(True for _ in self._candidates(problem, target, inputs, False))
        return SUPPORTED if any_left else Support("none of its kernels fits the problem")

    @abstractmethod
    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support: ...

    @final
    def compile_job(
        self, config: Config, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS
    ) -> CompileJob:
        """What to compile for one config. Its identity does not depend on where `inputs` lie.

        Raises:
            InputError: `check` refuses the config.
            UnavailableError: a tool or library is missing.
        """
        if not (possible := self.check(config, problem, target, inputs)):
            raise InputError(f"{config.name} can't compute {problem.key} on {target.name}: {possible}")
        return self._compile_job(config, problem, target, inputs)

    @abstractmethod
    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob: ...

    def warm_up(self, target: Target) -> None:
        """Load what compiling needs, in a compiler process that has nothing else to do yet."""

    @final
    def compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        """Compile one job in this process: the artifact, the code, the file name of the code.

        Raises:
            InputError: the compiler refuses it.
            UnavailableError: a tool is missing.
            OSError, MemoryError: the machine can't compile it now; a resumed run tries again.
        """
        _own(self, [job.config])
        return self._compile(job)

    @abstractmethod
    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]: ...

    @final
    def launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch | HostLaunch:
        """The launch of a compiled config on one problem.

        Raises:
            InputError: it was not compiled, the binary does not fit this version's way of passing arguments, or no such
                launch can be on the target.
        """
        _own(self, [artifact.config])
        if artifact.status != "ok":
            raise InputError(f"{artifact.config.name} was not compiled: {artifact.reason}")
        launch = self._launch(artifact, problem, target)
        if isinstance(launch, Launch) and (fault := launch.fault(target)):
            raise InputError(f"{artifact.config.name} can't be launched on {target.name}: {fault}")
        return launch

    @abstractmethod
    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch | HostLaunch: ...

    @final
    def with_strides(
        self, launch: Launch, config: Config, problem: Problem, strides: Mapping[str, tuple[int, int]]
    ) -> Launch | Support:
        """A launch of a config on operands that are not dense, or why there is none.

        Args:
            launch: on dense operands.
            config: what is launched.
            problem: what it computes.
            strides: by an operand's name, elements from one stored row to the next and from one product to the next.
        """
        found = self.stride_places(config, problem)
        return found if isinstance(found, Support) else found.move(launch, strides)

    def stride_places(self, config: Config, problem: Problem) -> StridePlaces | Support:
        """Where a config's launches have the strides of operands, or why they read dense operands alone.

        Args:
            config: what is launched.
            problem: what it computes.
        """
        return Support(f"kernels of {self.name} read dense operands alone")

    def manifest_row(self, record: Record, launch: Launch, target: Target) -> dict[str, Any] | Support:
        """A tuned kernel as a row of a manifest of assembly kernels without its object's name, or why it is none."""
        return Support(f"kernels of {self.name} can't be told in a manifest")


class SearchedBackend(KernelBackend, abstract=True):
    """A backend whose kernels come from templates with a search space; a strategy picks which configs are tried.

    Attributes:
        has_helpers: it compiles and launches kernels beside the products too, which are there as text.
    """

    has_helpers: ClassVar[bool] = False

    @abstractmethod
    def space(self, problem: Problem, target: Target) -> Space:
        """All configs of a problem, before pruning."""

    @abstractmethod
    def write_candidates(self, problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
        """Write the module that holds the kernels of these configs; its path."""

    @abstractmethod
    def write_winner(self, record: Record, target: Target, folder: Path) -> Path:
        """Write a record's kernel as a module to take away; its path."""

    @abstractmethod
    def interpreted(self, config: Config) -> Support:
        """Whether an interpreter on the CPU can run a config's kernel."""

    def helper_job(self, helper: HelperKernel, target: Target) -> CompileJob:
        """What to compile for a kernel beside the products.

        Raises:
            InputError: it can't be compiled.
        """
        raise InputError(f"{self.name} compiles products alone")

    def helper_launch(self, artifact: Artifact, helper: HelperKernel, arguments: HelperArguments) -> Launch:
        """The launch of a kernel beside the products, once compiled.

        Raises:
            InputError: it can't be launched so.
        """
        raise InputError(f"{self.name} launches products alone")


class LibraryBackend(Backend, abstract=True):
    """A library that is asked on its GPU for its algorithms, and launches them itself.

    Attributes:
        compiles: it compiles a kernel where that is first called.
    """

    compiles: ClassVar[bool] = False

    @final
    def list_algorithms(self, problem: Problem, operands: Operands, limit: int = 0) -> list[Config]:
        """The library's algorithms for a problem as configs, its best guess first.

        Args:
            problem: dtypes, layouts and bias.
            operands: A [M, K], B [K, N], C [M, N] and the problem's others, on the device.
            limit: most of them; 0 for all.
        """
        found = list(self._list_algorithms(problem, operands, limit))
        _own(self, found)
        return found

    @abstractmethod
    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]: ...

    @abstractmethod
    def operation(
        self, problem: Problem, operands: Operands, config: Config | None = None
    ) -> Callable[[], object] | None:
        """A call that computes C on the current stream, and can be captured; None where the library has it not.

        Args:
            problem: as for `list_algorithms`.
            operands: as for `list_algorithms`.
            config: one of them; None for the library's own choice.
        """

    def version(self) -> str:
        """Version of the library of the current device, with which its algorithms may change; "" where it has none."""
        return ""

    def torch_function(self, problem: Problem) -> str:
        """Name of the function of torch that a generated module may race against; "" where there is none."""
        return ""

    def load(self, record: Record, device_index: int, device: Any) -> LoadedKernel | Support:
        """A record's algorithm, loaded on a device, or why it can't be called from here.

        Args:
            record: a result that this backend won.
            device_index: as PyTorch counts.
            device: the driver's device (`hip_ext.driver.driver.Device`), the current one.
        """
        return Support(f"its winner {self.name} can't be called from here")

    def default_kernel(
        self, problem: Problem, precision: str, device_index: int, device: Any
    ) -> tuple[LoadedKernel, int] | None:
        """The kernel that PyTorch itself would launch, and the bytes of workspace that PyTorch gives it.

        Args:
            problem: x [M, K], w [N, K], a bias along N or none.
            precision: how float32 is multiplied, ``fp32`` or ``tf32``.
            device_index: as for `load`.
            device: as for `load`.

        Returns:
            None where that isn't known.
        """
        return None


def _own(backend: Backend, configs: Iterable[Config]) -> None:
    for config in configs:
        if config.backend != backend.name:
            raise InputError(f"{config.name} is a config of backend {config.backend}, not of {backend.name}")


# --- Numerics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FamilyDefaults:
    """Dtypes and order of B of a problem that does not say.

    Attributes:
        dtype_a: of A.
        dtype_b: of B; "" for A's.
        dtype_c: of C; "" for A's, or fp16 where A is fp8, or int32 where A is int8.
        order_b: order of B.
        row_major_b: B is stored [K, N]; otherwise [N, K].
    """

    dtype_a: str = "fp16"
    dtype_b: str = ""
    dtype_c: str = ""
    order_b: str = PLAIN
    row_major_b: bool = True


class Family(Plugin, abstract=True):
    """What is computed: C = A @ B with scales and a bias, in some dtypes.

    Attributes:
        summary: one line for ``--help``.
        defaults: dtypes of a problem that does not say.
        variants: other names for the family with other defaults, e.g. for another order of B.
        kinds: of `Problem.kind` that it can make inputs and references for.
    """

    package = "tritongemm.numerics.families"
    kind = "family"
    summary: ClassVar[str]
    defaults: ClassVar[FamilyDefaults] = FamilyDefaults()
    variants: ClassVar[Mapping[str, FamilyDefaults]] = {}
    kinds: ClassVar[tuple[str, ...]] = ("one",)

    @final
    def problem(  # noqa: PLR0913 (what a problem has)
        self,
        m: int,
        n: int,
        k: int,
        dtype_a: str,
        dtype_b: str,
        dtype_c: str,
        *,
        row_major_a: bool = True,
        row_major_b: bool = True,
        bias: str = "none",
        batch: int = 1,
        groups: int = 1,
        order_b: str = PLAIN,
        scales: str = "",
        shared: str = "",
        group_form: str = "contiguous",
        spread: str = "uniform",
        counts: tuple[int, ...] = (),
        room: int = 0,
    ) -> Problem:
        """A problem of this family with its operands; dtypes by our names, scales by that of one of `scalings`.

        Raises:
            InputError: a size, dtype, bias or granularity of scales that can't be.
        """
        pairs = self.scalings(dtype_a, dtype_b)
        pair = choose_pair(scales, pairs)
        return Problem(
            m, n, k, dtype_a, dtype_b, dtype_c, row_major_a, row_major_b, bias, batch, self.name, order_b, *pair,
            groups, group_form, spread, counts, room, scales="" if pair == pairs[0] else scales, shared=shared,
        )  # fmt: skip

    def scaling(self, dtype_a: str, dtype_b: str) -> ScalePair:
        """The scale factors that A and B of these types have in this family where nobody says otherwise."""
        return NO_SCALES

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """All pairs of scale factors that A and B of these types may have in this family, that of `scaling` first."""
        return (self.scaling(dtype_a, dtype_b),)

    @final
    def supports(self, problem: Problem, target: Target) -> Support:
        """Whether a target can compute a problem, whatever kernels there are for it."""
        if problem.kind not in self.kinds:
            kinds = " and ".join(self.kinds)
            return Support(
                f"family {self.name} computes {kinds} GEMM a call; {problem.kind} ones (batch {problem.batch}, groups "
                f"{problem.groups}) are not computed yet"
            )
        pairs = self.scalings(problem.dtype_a, problem.dtype_b)
        pair = problem.scale_a, problem.scale_b
        if pair not in pairs or problem.scales != ("" if pair == pairs[0] else granularity(pair)):
            return Support(f"{problem.key} does not have the scales of family {self.name}")
        if problem.held_bytes > target.memory_bytes:
            return Support(f"its operands take {problem.held_bytes} bytes, {target.name} has {target.memory_bytes}")
        return self._supports(problem, target)

    @abstractmethod
    def _supports(self, problem: Problem, target: Target) -> Support: ...

    @abstractmethod
    def make_inputs(self, problem: Problem, device: str, distribution: str = "randn", seed: int = 0) -> Operands:
        """Random operands: A [M, K], B [K, N] and the others by their names, in the problem's orders; those that each
        product of a batch has have a dimension for it in front.
        """

    @abstractmethod
    def reference(self, problem: Problem, operands: Operands) -> Tensor:
        """C in float64 [M, N], or [batch, M, N]."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: of max |C - reference| / (|reference| + rms)."""

    @abstractmethod
    def input_deviation(self, problem: Problem) -> float:
        """Standard deviation of the random floats of A and B."""

    def typical_scale(self, problem: Problem) -> float:
        """Middle of the random scale factors, of A and of B alike; random operands then give a C of about one."""
        return 1.0


@dataclass(frozen=True)
class Pieces:
    """How the columns of B are interleaved: groups of them follow each other, in each the next piece of every column.

    Attributes:
        columns: of a group.
        run: elements of a column that stay together, along K; of packed ones bytes.
    """

    columns: int
    run: int


class WeightLayout(Plugin, abstract=True):
    """An order of B in memory beside rows and columns."""

    package = "tritongemm.numerics.weight_layouts"
    kind = "weight layout"

    @abstractmethod
    def supports(self, problem: Problem) -> Support:
        """Whether a problem's B can lie in this order."""

    def pieces(self, dtype: DType) -> Pieces | None:
        """How columns of a type are interleaved in pieces, which generated kernels can read; None in another order."""
        return None

    @abstractmethod
    def pack(self, b: Tensor) -> Tensor:
        """B [K, N], column-major, in this order; of packed elements K counts bytes."""

    @abstractmethod
    def unpack(self, b: Tensor) -> Tensor:
        """What `pack` was given."""


class ScaleLayout(Plugin, abstract=True):
    """An order of scale factors in memory beside rows and groups.

    Attributes:
        pad: multiples to which rows and groups are padded.
        row_place, group_place: the place of a factor in memory is their sum: what its row adds and what its group along
            K adds, as kernels write them of ``r``, ``g`` and ``groups``, the number of groups of a row with padding;
            "" where no kernel of ours reads the order.
    """

    package = "tritongemm.numerics.scale_layouts"
    kind = "scale layout"
    pad: ClassVar[tuple[int, int]] = (1, 1)
    row_place: ClassVar[str] = ""
    group_place: ClassVar[str] = ""

    @abstractmethod
    def pack(self, scales: Tensor) -> Tensor:
        """Factors [rows, groups along K], padded, in this order."""

    @abstractmethod
    def unpack(self, scales: Tensor) -> Tensor:
        """What `pack` was given."""


# --- Measuring --------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """A timer made ready on a device."""

    def time(self, graph: Any, launches: int, symbol: str = "") -> float:
        """Seconds of one launch, from a replay of a captured graph of so many.

        Args:
            graph: the captured launches.
            launches: how many.
            symbol: the kernel that each launches; "" for any.
        """


class Timer(Plugin, abstract=True):
    """A clock.

    Attributes:
        label: what results say of it.
        vendor: whose GPUs it reads; "" for any.
        screens_with: another timer that screens in its place; "" for itself.
        counts_gaps: the time from one launch to the next counts, so a lead-in kernel runs before each sample.
    """

    package = "tritongemm.measure.timers"
    kind = "timer"
    label: ClassVar[str]
    vendor: ClassVar[str] = ""
    screens_with: ClassVar[str] = ""
    counts_gaps: ClassVar[bool] = False

    def prepare(self) -> None:
        """Register with the profiler, before the process first uses its GPU."""

    @abstractmethod
    def clock(self, device: Any, stream: int) -> Clock:
        """The clock on a driver's device, for graphs that run on a stream's handle."""


@dataclass(frozen=True)
class ExternalRaceJob:
    """A race that a profiler runs in a process of its own.

    Attributes:
        problem, target: what and where.
        configs: verified finalists.
        baseline: plug-in of backends/ that races with them; "" for none.
        device: ordinal.
        rotating_mb: MB that the operands rotate through.
        warmup, iters: launches of each, untimed and timed.
        timeout_s: seconds the tool may take.
    """

    problem: Problem
    target: Target
    configs: tuple[Config, ...]
    baseline: str
    device: int
    rotating_mb: int
    warmup: int
    iters: int
    timeout_s: float


class ExternalTimer(Timer, abstract=True):
    """A clock that runs the final race in a process of its own; another timer, `screens_with`, screens."""

    @final
    def clock(self, device: Any, stream: int) -> Clock:
        """There is none.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.name} times whole races in a process of its own; {self.screens_with} times graphs")

    @abstractmethod
    def race(self, job: ExternalRaceJob) -> dict[str, list[float]]:
        """Seconds of each launch by config name, the baseline's under `core.trial.BASELINE_ENTRY`."""

    def races(self, backend: str) -> Support:
        """Whether kernels of a backend can take part."""
        return SUPPORTED


class Evaluator(ABC):
    """What times and verifies candidates: a GPU, or what stands in for one.

    Attributes:
        target: facts of the device.
        times_quantization: whether `time_quantization` measures anything.
    """

    target: Target
    times_quantization: bool = False

    @abstractmethod
    def start(self) -> None:
        """Begin to start; it may take seconds, in which problems can be planned."""

    @abstractmethod
    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """A cheap time for each candidate, as they come; `best_s`: seconds of the best so far."""

    @abstractmethod
    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """The error of each candidate."""

    @abstractmethod
    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates and race those that pass with a baseline backend ("" for none), briefly where asked."""

    @abstractmethod
    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """The configs that a library has for a problem, `limit` of them unless that is 0."""

    @abstractmethod
    def describe(self, problem: Problem, config: Config) -> str:
        """How a result is verified, in a few words."""

    def time_quantization(self, problem: Problem, launches: tuple[Launch, ...]) -> float | None:
        """Seconds of the kernels that quantise A, in order; None where they can't be measured."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the device back."""


# --- Searching --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchPlan:
    """What a strategy is given.

    Attributes:
        space: where neighbours are looked for; names the problem and the target.
        expected: kept configs with their predictions, the best first; at least one.
        seeds: winners of similar problems, to be tried first.
        compiled: names of kernels that other problems of the run ask for, which cost no compile.
        population: configs of a generation, for a strategy that has generations; 0 for its own number.
    """

    space: Space
    expected: Predictions
    seeds: tuple[Config, ...] = ()
    compiled: Collection[str] = field(default=frozenset())
    population: int = 0


class Strategy(Plugin, abstract=True):
    """A search: which of a problem's configs are tried, in which order.

    Attributes:
        population: configs of a generation, where the search has generations and a plan does not say; 0 where it has
            none.
    """

    package = "tritongemm.search.strategies"
    kind = "strategy"
    population: ClassVar[int] = 0

    @abstractmethod
    def search(self, plan: SearchPlan, budget: int) -> Search:
        """A generator that yields batches of configs and is sent their trials; it ends where it wants no more.

        Args:
            plan: what there is to try.
            budget: most configs to try; 0 for the strategy's own.
        """


class Watcher(Protocol):
    """What is told of the progress of a run."""

    def planned(self, problem: Problem, total: int, pruned: Pruned) -> None:
        """A space of `total` configs was pruned."""

    def offered(self, problem: Problem, backend: str, count: int, why: str) -> None:
        """A backend has `count` candidates; `why` is said where there are none."""

    def refused(self, problem: Problem, backend: str, reason: str) -> None:
        """A backend can't compute the problem, or failed to say."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins that has `total` steps."""

    def step(self, name: str, count: int = 1) -> None:
        """Steps of a stage are done."""

    def trial(self, problem: Problem, trial: Trial) -> None:
        """A candidate was timed, verified or refused."""

    def failed(self, problem: Problem, reason: str) -> None:
        """The run has no result for the problem."""

    def compiled(self, builds: Mapping[Problem, Collection[Artifact]]) -> None:
        """Kernels were compiled, or could not be."""


# --- Files ------------------------------------------------------------------------------------------------------------


class Format(Plugin, abstract=True):
    """A file format of sizes or results.

    Attributes:
        title: what it is, in a few words, for messages.
        suffixes: file names end so.
        can_write: it can tell our results.
        padded_m: AITER looks its rows up at a padded M where a call has no row of its own M.
        families: names that its files have for what they compute, which a user may say in place of ours.
        keeps_folder: results are told in several files of a folder, whose names say what they are of.
    """

    package = "tritongemm.formats"
    kind = "format"
    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    can_write: ClassVar[bool] = False
    padded_m: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ()
    keeps_folder: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file is in this format, by its name or contents."""

    @abstractmethod
    def read(self, path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
        """The rows of a file, in its order.

        Args:
            path: for messages.
            text: contents.
            defaults: what holds for a row that does not say.

        Raises:
            InputError: a row is wrong; names file, row, line and field.
        """

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """As `read`, with the damaged rows apart; a format that can't tell them apart refuses the file.

        Raises:
            InputError: the file as a whole can't be read.
        """
        rows = self.read(path, text, defaults)
        return ResultsFile(rows=tuple(replace(row, number=number) for number, row in enumerate(rows, start=1)))

    def write(self, records: Iterable[Record]) -> str:
        """The records as a file's text; `read` gives equal records back.

        Raises:
            InputError: the format can't tell results.
        """
        raise InputError(f"{self.title} can't hold our results")

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Tell records in this format, beside what its files hold already.

        Rows of `before` that tell of other problems or devices are kept as they are, byte for byte.

        Args:
            records: the results. Several of one problem on one device are its best and what may stand for it where the
                format can't tell that, the best first.
            before: text of each file that is there, by its name; "" is the output itself.

        Raises:
            InputError: the format can't be written, or a file that is there is not in it.
        """
        told = list(records)
        return Translation({"": self.write(told)}, len(told))

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """As `translate`, where the rows that asked for the results are known.

        Args:
            rows: sizes that were tuned.
            records: the results.
            before: text of each file that is there.
        """
        return self.translate(records, before)

    def can_tell(self, config: Config) -> bool:
        """Whether `translate` may tell a generated kernel of this config, for a result that another kernel won."""
        return False

    def merge(self, sources: Sequence[tuple[Path, str]], family: str = "") -> Merged | None:
        """Files of this format as one, with the rows that nobody here can run; None where the format has no such rows.

        Args:
            sources: path and text of each; of rows that tell of the same thing the fastest is kept, on ties the first.
            family: what they compute, where the files do not say.

        Raises:
            InputError: a file can't be read, or they do not belong together.
        """
        return None

    def arrange(self, text: str) -> str:
        """The text of a file of this format with its rows sorted, where the format has an order of its own."""
        return text

    @property
    def tells_results(self) -> bool:
        """Whether `translate` can tell results, all that there is to say of them or not."""
        return self.can_write or type(self).translate is not Format.translate


class ServerFormat(Format, abstract=True):
    """A format that sets the kernels of a server's own, which can be raced with what they take of a config.

    Attributes:
        server: its name.
        computes: the kind of problem (`Problem.kind`) that its kernels are for. Of ``grouped`` ones a row is of the
            two products of a layer of experts, which one config serves.
    """

    server: ClassVar[str]
    computes: ClassVar[str] = "one"

    @property
    def backend(self) -> str:
        """Name of the backend whose kernels are the server's own, where there is one."""
        return self.server.lower()

    @abstractmethod
    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """The sizes that the server looks up for a weight of N columns of the result and depth K.

        Args:
            n: columns; of experts the inner size of one.
            k: depth; of experts the hidden size.
            defaults: what the user says besides.
            chosen: experts that a token goes to.
            tokens: every M to list; those that the server's own tables have where there are none.

        Raises:
            InputError: the server has no such table for the family and dtype.
        """

    @abstractmethod
    def limits(self, family: str, target: Target) -> SearchLimits:
        """What of a search space the server's kernel takes, with what the server runs today to be tried first.

        Raises:
            InputError: the server has no such table for the family.
        """


class ResultsFormat(Format, abstract=True):
    """The format in which our own results are kept, and what newer versions wrote into them."""

    @abstractmethod
    def read_results(self, path: Path, text: str, defaults: Defaults | None = None) -> ResultsFile:
        """All that a file holds, with the rows that only a newer version can use.

        Args:
            path: for messages.
            text: contents.
            defaults: what holds for a row that does not say.

        Raises:
            InputError: a row is wrong; names file, row, line and field.
        """

    @abstractmethod
    def write_results(self, records: Iterable[Record], schema: int = SCHEMA, newer: Iterable[NewerRow] = ()) -> str:
        """The records as a file's text, with rows of a newer version at the places that they had.

        Args:
            records: in the order of their lines.
            schema: the one that was read, where rows of a newer version are among them.
            newer: rows to write back as they are.

        Raises:
            InputError: a record that a row can't tell.
        """

    @abstractmethod
    def write_sizes(self, rows: Iterable[FormatRow]) -> str:
        """Sizes as a file's text, with how often each is called; `read` gives equal problems back.

        Args:
            rows: in the order of their lines.

        Raises:
            InputError: a problem that a row can't tell.
        """


class CallLog(Plugin, abstract=True):
    """Lines of a library's log that tell which products it was asked for.

    One file may hold lines of several kinds, among those of other programs; each plug-in finds its own.

    Attributes:
        title: what writes them, and how it is asked to, for messages.
    """

    package = "tritongemm.campaigns.logs"
    kind = "call log"
    title: ClassVar[str]

    @abstractmethod
    def read(self, text: str) -> LogContents:
        """What the lines of this kind tell, in their order; nothing where a text has none.

        A line that is cut is a fault, never a call that the library was not asked for.

        Args:
            text: of the whole log, with lines of other kinds, of several processes and of other programs.
        """


# --- Serving ----------------------------------------------------------------------------------------------------------


class KernelSource(Plugin, abstract=True):
    """Who may serve a call at run time.

    Attributes:
        rank: sources are asked in the order of their ranks, the lowest first.
    """

    package = "tritongemm.serving.sources"
    kind = "kernel source"
    rank: ClassVar[int]

    @abstractmethod
    def resolve(self, call: CallSignature, device: Any) -> Resolution | Support:
        """Who serves the call on a device (`serve.device_kernels.DeviceKernels`), or why this source does not."""
