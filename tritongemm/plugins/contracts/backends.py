"""The contracts of backends, which are sources of GEMM kernels."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import HostLaunch, Launch, StridePlaces
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.served_call import LoadedKernel
from tritongemm.core.space import Space
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.capabilities import NO_INPUTS, BuildInputs, Capabilities
from tritongemm.plugins.contracts.plugin import Plugin


class Backend(Plugin, abstract=True):
    """A source of GEMM kernels."""

    package = "tritongemm.backends"
    kind = "backend"
    summary: ClassVar[str]  # one line for `--help`
    capabilities: ClassVar[Capabilities]  # the problems that its kernels can compute at all
    baseline: ClassVar[bool] = False  # whether it is what users run today, against which every race is measured
    # Seconds that one compile may take; 0 for the run's `--timeout`. A backend with its own limit races only if it is
    # named or all are asked for, and compiles in the background if this package compiles its kernels.
    compile_limit_s: ClassVar[float] = 0.0
    # Whether it races only if it, or the server whose kernels it launches, is named; never for `all`.
    named_only: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The backend's name in tables."""
        return self.name

    def named_kernel(self, config: Config | None) -> NamedKernel | None:
        """Return a config's (None: the backend's own) kernel as other tools' files name it; None if none can run it."""
        return None

    def config_of(self, kernel: NamedKernel) -> Config | None:
        """Return the config of a kernel that another tool's file names; None if it is unknown."""
        return None

    @final
    def supports(self, problem: Problem, target: Target) -> Support:
        """Say whether it has a kernel for a problem on a target; the reason names the number or type that decides."""
        return self.capabilities.supports(problem, target) and self._supports(problem, target)

    def _supports(self, problem: Problem, target: Target) -> Support:
        """Return whether it has a kernel for a problem that `capabilities` allow."""
        return SUPPORTED

    @final
    def check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS) -> Support:
        """Say whether a config of this backend, wherever it comes from, can compute a problem on a target.

        Every config is checked before anything is compiled or launched. Whatever numbers it contains, the answer is a
        reason rather than an exception; only the config of another backend raises an InputError. `inputs` are files
        that list kernels.
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

    def reduction_order(self, config: Config, problem: Problem, target: Target) -> ReductionOrder | Support:
        """Return the order in which a config adds up products, the same at every M; or why it can't be stated.

        Two configs with equal orders must give equal bits. Of a `LibraryBackend` it is what its algorithm names, and
        bits are compared.
        """
        return Support(f"{self.name} does not state in which order its kernels add up products")


class KernelBackend(Backend, abstract=True):
    """A backend whose kernels are compiled by this package."""

    has_plans: ClassVar[bool] = True  # whether its launches can be written as launch plans
    has_manifest_rows: ClassVar[bool] = False  # whether `manifest_row` can describe its kernels

    @final
    def candidates(
        self, problem: Problem, target: Target, inputs: BuildInputs = NO_INPUTS, everything: bool = False
    ) -> list[Config]:
        """List configs to try, the most promising first; empty if it has none for the problem.

        With `everything` it is all configs, not only those that a tuning run tries by default. A file of `inputs` that
        is wrong raises an InputError.
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
        """Say whether `candidates` has any, or why not. Raises InputError: a file that lists kernels is wrong."""
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
        """Return the compile job of one config, whose identity does not depend on the paths of `inputs`.

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
        """Load what compiling needs, in a compiler process that is still idle."""

    @final
    def compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        """Compile one job in this process, and return the artifact, the code and the code's file name.

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
        """Return the launch of a compiled config for one problem.

        Raises:
            InputError: it was not compiled, the binary does not fit this version's way of passing arguments, or the
                launch exceeds the target's limits.
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

    def stride_places(self, config: Config, problem: Problem) -> StridePlaces | Support:
        """Return which launch parameters are operand strides, or why the kernels need contiguous operands."""
        return Support(f"kernels of {self.name} read dense operands alone")

    def manifest_row(self, record: Record, launch: Launch, target: Target) -> dict[str, Any] | Support:
        """Return a tuned kernel's row for an assembly manifest, without its object's name, or why it has none."""
        return Support(f"kernels of {self.name} can't be written to a manifest")


class SearchedBackend(KernelBackend, abstract=True):
    """A backend whose kernels come from templates with a search space, of which a strategy selects configs to try."""

    has_helpers: ClassVar[bool] = False  # whether it also compiles and launches helper kernels from source text

    @abstractmethod
    def space(self, problem: Problem, target: Target) -> Space:
        """Return all configs of a problem, before pruning."""

    @abstractmethod
    def write_candidates(self, problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
        """Write the module that contains the kernels of these configs, and return its path."""

    @abstractmethod
    def write_winner(self, record: Record, target: Target, folder: Path) -> Path:
        """Write a record's kernel as a standalone module, and return its path."""

    @abstractmethod
    def interpreted(self, config: Config) -> Support:
        """Say whether an interpreter on the CPU can run a config's kernel."""

    def helper_job(self, helper: HelperKernel, target: Target) -> CompileJob:
        """Return the compile job of a helper kernel. Raises InputError: it can't be compiled."""
        raise InputError(f"{self.name} compiles products alone")

    def helper_launch(self, artifact: Artifact, helper: HelperKernel, arguments: HelperArguments) -> Launch:
        """Return the launch of a compiled helper kernel; an InputError if these arguments do not suit it."""
        raise InputError(f"{self.name} launches products alone")


class LibraryBackend(Backend, abstract=True):
    """A library that lists its algorithms on its GPU, and launches them itself."""

    compiles: ClassVar[bool] = False  # whether it compiles a kernel at the kernel's first call
    states_orders: ClassVar[bool] = False  # whether algorithms of equal reduction orders give equal bits

    @final
    def list_algorithms(self, problem: Problem, operands: Operands, limit: int = 0) -> list[Config]:
        """List the library's algorithms as configs, in the order of its heuristic, at most `limit` unless that is 0.

        The operands are on the device: A [M, K], B [K, N], C [M, N] and the problem's others.
        """
        found = list(self._list_algorithms(problem, operands, limit))
        _own(self, found)
        return found

    @abstractmethod
    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]: ...

    @abstractmethod
    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a capturable call that computes C on the current stream; None if the library can't compute it.

        The config is one of `list_algorithms`, or None for the library's own choice.
        """

    def version(self) -> str:
        """Return the version of the current device's library, which determines its algorithms; "" if unknown."""
        return ""

    def torch_function(self, problem: Problem) -> str:
        """Return the name of the torch function that a generated module can race against, or ""."""
        return ""

    def load(self, record: Record, device_index: int, device: Any) -> LoadedKernel | Support:
        """Load the algorithm of a record that this backend won, or say why it can't be called.

        The device is the current one, by PyTorch's index and as the driver's (`hip_ext.driver.driver.Device`).
        """
        return Support(f"its winner {self.name} can't be called from here")

    def default_kernel(
        self, problem: Problem, precision: str, device_index: int, device: Any
    ) -> tuple[LoadedKernel, int] | None:
        """Return the kernel that PyTorch itself would launch, and its bytes of workspace; None if that is not known.

        The problem is of x [M, K] and w [N, K], with a bias along N or none; float32 is multiplied as `precision` says,
        ``fp32`` or ``tf32``.
        """
        return None


def _own(backend: Backend, configs: Iterable[Config]) -> None:
    for config in configs:
        if config.backend != backend.name:
            raise InputError(f"{config.name} is a config of backend {config.backend}, not of {backend.name}")
