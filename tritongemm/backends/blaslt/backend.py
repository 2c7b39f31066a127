"""The backend of the vendor's own GEMM library, cuBLASLt or hipBLASLt, with each of its algorithms as a candidate."""

import re
from collections.abc import Iterable

from tritongemm.backends.blaslt import algorithms, scale_modes, served_algorithm
from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.served_call import LoadedKernel
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.driver import driver
from tritongemm.plugins.contracts import Capabilities, LibraryBackend

_SOLUTION = ("Cijk_", "Custom_Cijk_")  # names of Tensile's kernels begin so


class BlasltBackend(LibraryBackend):
    """The algorithms of the vendor's library."""

    summary = "the algorithms of the vendor's library, hipBLASLt or cuBLASLt"
    aliases = ("hipblaslt", "cublaslt")
    capabilities = Capabilities(kinds=("one", "batched"), scales=("epilogue", "mainloop"), tensor_scales=True)

    @property
    def label(self) -> str:
        """The library's name in tables, which depends on the driver."""
        return blaslt_tables.TABLES[algorithms.vendor() or "nvidia"].label

    def named_kernel(self, config: Config | None) -> NamedKernel | None:
        """Return the name of a hipBLASLt solution; cuBLASLt's have none, and no other tool's files name them."""
        if config is None or config.template == algorithms.NAMELESS or "index" not in dict(config.options):
            return None
        return NamedKernel("hipblaslt", config.template, config.option("index"))

    def config_of(self, kernel: NamedKernel) -> Config | None:
        """Return a solution by its name; a number alone means another solution in another library version."""
        known = re.fullmatch(r"\w+", kernel.name) and kernel.name.startswith(_SOLUTION)
        return algorithms.config_of_solution(kernel.name, kernel.index) if known else None

    def available(self) -> Support:
        """Say whether there is a GPU whose library loads."""
        vendor = algorithms.vendor()
        if not vendor:
            return Support("it needs a GPU: no CUDA or HIP driver with a device is here")
        try:
            blaslt_library.open_library(vendor)
        except UnavailableError as error:
            return Support(str(error))
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        if problem.a.scaling is None and problem.b.scaling is None:
            return SUPPORTED  # the search for a driver takes 30 ms where there is none
        return scale_modes.supports(problem, target, algorithms.vendor(), algorithms.version)

    def reduction_order(self, config: Config, problem: Problem, target: Target) -> ReductionOrder | Support:
        """Return that all of K is added up from its first product to its last, unless the algorithm splits K."""
        if config.split_k > 1:
            return Support(f"the library does not say how it adds the sums of {config.split_k} splits")
        return ReductionOrder(problem.k, problem.k)

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        return algorithms.list_configs(problem, operands, limit)

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a call that computes C with one algorithm on torch's current stream; None if the library lacks it."""
        return algorithms.prepare_call(problem, operands, config)

    def version(self) -> str:
        """Return the version of the current device's library."""
        return str(algorithms.version())

    def load(self, record: Record, device_index: int, device: driver.Device) -> LoadedKernel | Support:
        """Load a record's algorithm on a device, or say why it can't be called."""
        available = self.available()
        return served_algorithm.load_tuned(record, device_index, device) if available else available

    def default_kernel(
        self, problem: Problem, precision: str, device_index: int, device: driver.Device
    ) -> tuple[LoadedKernel, int] | None:
        """Return the kernel that PyTorch itself would launch, and the bytes of workspace that PyTorch gives it."""
        return served_algorithm.load_torch_default(problem, precision, device_index, device)
