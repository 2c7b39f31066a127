"""The backend of DeepGEMM's bf16 and block-scaled fp8 products, if the deep_gemm package is installed.

The package compiles a kernel for each shape at its first call, which takes seconds; a call is made before it is timed.
"""

from collections.abc import Iterable
from dataclasses import replace

from tritongemm.backends._accepted import accepts
from tritongemm.backends._scales import coverage, dense, factors
from tritongemm.backends.deepgemm import grouped, package, served
from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import LoadedKernel
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.driver import driver
from tritongemm.plugins.contracts import Capabilities, LibraryBackend

_ROW_BYTES = 16  # The copy engine fetches rows that begin at multiples of these.


class DeepGemmBackend(LibraryBackend):
    """DeepGEMM, which chooses its kernel itself and may let kernels overlap."""

    summary = "DeepGEMM's bf16 and block-scaled fp8, where the deep_gemm package is installed"
    aliases = ("deep_gemm",)
    compile_limit_s = 60.0
    compiles = True
    capabilities = Capabilities(archs=("sm90",), kinds=("one", "grouped"), scales=("mainloop",))

    def available(self) -> Support:
        """Say whether the package is installed and loads."""
        try:
            package.load()
        except UnavailableError as error:
            return Support(str(error))
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        if problem.bias != "none":
            return Support("it adds no bias")
        if problem.a.type.is_fp8:
            known = _fits_scaled(problem)
        else:
            types = (problem.a.dtype, problem.b.dtype, problem.c.dtype)
            known = SUPPORTED if types in _PLAIN else Support(f"it multiplies bf16 or fp8, not {problem.dtypes}")
        if problem.kind == "grouped" and problem.layout != "TN":
            return Support(f"groups must be contiguous along K (TN), not {problem.layout}")
        return known and _aligned(problem)

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        if self.operation(problem, operands) is None:
            return []
        name = grouped.function(problem) if problem.kind == "grouped" else package.function(problem)
        one = Config(name, 0, 0, 0, num_warps=0, num_stages=0, backend=self.name)
        found = [one, replace(one, options=(("overlap", 1),))] if package.can_overlap() else [one]
        return found[: limit or None]

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a call that computes C, whose kernel is compiled; None if the package refuses the problem.

        Factors in another layout are copied here. Without a config consecutive kernels may not overlap, and a grouped
        product whose rows are padded is returned in the package's layout, as a user gets it.
        """
        overlap = bool(config and config.option("overlap"))
        try:
            call = self._call(problem, operands, config is not None, overlap)
        except UnavailableError:
            return None
        return call if accepts(call) else None

    def _call(self, problem: Problem, operands: Operands, into_c: bool, overlap: bool) -> Call:
        if problem.kind == "grouped":
            return grouped.product(problem, operands, into_c, overlap)
        tensors: dict[str, Tensor] = {"a": operands["a"], "b": operands["b"].T, "c": operands["c"]}
        if coverage(problem):
            of_a = dense(factors(problem, operands, "scale_a").T, package.ALIGNED_ROWS)
            tensors["scale_a"] = of_a[:, : problem.m].T
            tensors["scale_b"] = dense(factors(problem, operands, "scale_b"))
        return package.product(problem, tensors, overlap)

    def version(self) -> str:
        """Return the version of the package."""
        return str(package.load().__version__)

    def load(self, record: Record, device_index: int, device: driver.Device) -> LoadedKernel | Support:
        """Load the kernel of a record, to be called at any addresses, or say why it can't be."""
        if record.problem.kind != "one":
            return Support("grouped products of DeepGEMM can't be called from here")
        available = self.available()
        return served.load(record, device_index, device) if available else available


_PLAIN = (("bf16", "bf16", "bf16"), ("bf16", "bf16", "fp32"))


def _fits_scaled(problem: Problem) -> Support:
    if (problem.a.dtype, problem.b.dtype, problem.c.dtype) != ("fp8e4m3fn", "fp8e4m3fn", "bf16"):
        return Support(f"of fp8 it multiplies e4m3fn into bf16, not {problem.dtypes}")
    if coverage(problem) != "block":
        return Support("its scales of fp8 are for 1 x 128 of A and 128 x 128 of B")
    return (
        SUPPORTED if problem.layout == "TN" else Support(f"fp8 must be contiguous along K (TN), not {problem.layout}")
    )


def _aligned(problem: Problem) -> Support:
    """Return whether each matrix's rows begin at addresses from which the copy engine can fetch."""
    dtypes = problem.a.type, problem.b.type, problem.c.type
    for name, lead, dtype in zip("ABC", problem.leads, dtypes, strict=True):
        if lead * dtype.bytes % _ROW_BYTES:
            return Support(f"rows of {name} take {lead * dtype.bytes} bytes, which is no multiple of {_ROW_BYTES}")
    return SUPPORTED
