"""The timer that reads CUPTI's kernel records, in process, on NVIDIA; gaps between launches are not included."""

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.driver import Device
from tritongemm.hip_ext.profilers import cupti
from tritongemm.measure.timers._traced import TracedClock
from tritongemm.plugins.contracts import Timer


class CuptiTimer(Timer):
    """Times of kernels as NVIDIA's profiler library, CUPTI, records them."""

    label = "cupti"
    vendor = "nvidia"
    screens_with = "events"  # Events cost a fifth of a trace, and are good enough to pick finalists.

    def available(self) -> Support:
        """Say whether CUPTI can trace here; if it can, it stays enabled."""
        try:
            driver.open_driver(self.vendor)
            self.prepare()
        except TritonGemmError as error:
            return Support(str(error))
        return SUPPORTED

    def prepare(self) -> None:
        """Register with CUPTI and enable it, before the process loads code."""
        cupti.open_tracer().enable()

    def clock(self, device: Device, stream: int) -> TracedClock:
        """Return a clock that reads the records of this process's CUPTI."""
        return TracedClock(cupti.open_tracer(), device.synchronize, stream)
