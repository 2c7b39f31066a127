"""The contracts of backends: sources of GEMM kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.serving import LoadedKernel
from tritongemm.core.space import Space
from tritongemm.core.stride_places import StridePlaces
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.capabilities import NO_INPUTS, BuildInputs, Capabilities
from tritongemm.plugins.contracts.plugin import Plugin


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
        """Whether it has a kernel for a problem that `capabilities` allow."""
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
