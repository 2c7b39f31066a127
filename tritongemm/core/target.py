"""The class `Target`, which has the facts of one GPU architecture from search_spaces/*.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritongemm.core.dtypes import DType
from tritongemm.core.errors import TargetError


@dataclass(frozen=True)
class Target:
    """One GPU."""

    name: str  # architecture, e.g. `gfx942` or `sm90`; the stem of its YAML
    vendor: str  # `amd` or `nvidia`
    product: str  # the chip whose figures these are
    compute_units: int  # CUs or SMs
    wave_size: int  # threads of a wave or warp
    lds_bytes: int  # most LDS / shared memory one program may use
    lds_per_cu: int  # LDS / shared memory of a compute unit
    registers_per_cu: int  # 32-bit vector registers of a compute unit
    max_registers: int  # most of them one thread may use
    max_threads_per_cu: int  # threads resident on a compute unit
    max_threads: int  # most threads of one workgroup
    launch_threads: int  # most threads of a launch along one axis; 0 where only the number of workgroups is limited
    xcds: int  # dies with an L2 of their own
    l2_bytes: int  # size of one such L2
    llc_bytes: int  # size of the last-level cache; timing rotates through more than this
    memory_bytes: int  # device memory
    # hbm_gbps, llc_gbps, l2_gbps: bandwidths in GB/s, of the entire device
    hbm_gbps: float
    llc_gbps: float
    l2_gbps: float
    l2_neighbours: int  # programs, in launch order, that draw a block from L2 once if they load it at the same time
    clock_ghz: float  # peak engine clock
    launch_us: float  # shortest kernel seen, in microseconds
    memory_ns: float  # from issuing a load that misses every cache to its data, in nanoseconds
    lds_bytes_per_clock: int  # LDS / shared memory bandwidth of a compute unit
    request_bytes: int  # what opening one more row costs caches and memory, as bytes moved: half a line or a sector
    free_stages: int  # stages of a software pipeline that hold no LDS buffer (they wait in registers or are consumed)
    store_wait: str  # hardware counter that says that a wave's stores have landed; "" where a barrier waits for them
    sum_elements: int  # most elements of a shared tile that a program adds up at a time; 0 for a full tile
    fp8: str  # encoding its matrix units read: `fn`, `fnuz` or `none`
    peak_tflops: Mapping[str, float] = field(hash=False)  # dense matrix rate by dtype (`fp8` for all eight-bit floats)
    features: frozenset[str]  # capabilities templates and rules ask for

    def has(self, feature: str) -> bool:
        """Return whether kernels for it may use a feature, by the name that templates ask for."""
        return feature in self.features

    def supports(self, dtype: DType) -> bool:
        """Return whether matrix instructions read this dtype."""
        if dtype.is_fp8:
            return (self.fp8 == "fnuz") == dtype.name.endswith("fnuz") and self.fp8 != "none"
        return dtype.name in self.peak_tflops

    def tflops(self, dtype: DType) -> float:
        """Return the dense matrix rate for a dtype; a TargetError if the target has no matrix instruction for it."""
        if not self.supports(dtype):
            raise TargetError(f"{self.name} has no matrix instruction for {dtype.name}")
        return self.peak_tflops["fp8" if dtype.is_fp8 else dtype.name]

    def roofline_seconds(self, flops: int, nbytes: int, dtype: DType) -> float:
        """Return the shortest time by the data sheet in seconds, at fp16's rate for converted operands."""
        rate = self.tflops(dtype) if self.supports(dtype) else self.peak_tflops["fp16"]
        return max(flops / (rate * 1e12), nbytes / (self.hbm_gbps * 1e9))
