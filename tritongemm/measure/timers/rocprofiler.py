"""The timer that reads rocprofiler-sdk's kernel records, in process, on AMD; gaps between launches are not included."""

from collections.abc import Iterator

from tritongemm.core.errors import UnavailableError
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.driver import Device
from tritongemm.hip_ext.profilers import rocprofiler
from tritongemm.measure.timers._traced import TracedClock
from tritongemm.plugins.contracts import Timer
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

_PROBE_TIMEOUT_SECONDS = 60.0  # limit of the process that tries the SDK


class RocprofilerTimer(Timer):
    """Times of kernels as AMD's profiler library, rocprofiler-sdk, records them."""

    label = "rocprofiler"
    vendor = "amd"
    screens_with = "events"  # Events cost a fifth of a trace, and are good enough to pick finalists.

    def available(self) -> Support:
        """Say whether the SDK can trace here, tried in a separate process.

        The SDK accepts tools only before a process first uses the GPU, and may abort if one registers later.
        """
        try:
            driver.open_driver(self.vendor)
        except UnavailableError as error:
            return Support(str(error))
        child = WorkerProcess("tritongemm.measure.timers.rocprofiler:RocprofilerProbe")
        try:
            answers: list[Support] = list(child.ask(None, _PROBE_TIMEOUT_SECONDS))
            return answers[0]
        except (WorkerDied, WorkerTimeout, WorkerError) as error:
            return Support(f"rocprofiler-sdk could not be asked: {error}")
        finally:
            child.kill()

    def prepare(self) -> None:
        """Register with the SDK; only before the process first uses the GPU."""
        rocprofiler.configure()

    def clock(self, device: Device, stream: int) -> TracedClock:
        """Return a clock that reads the records of this process's SDK."""
        return TracedClock(rocprofiler.configure(), device.synchronize, stream)


class RocprofilerProbe:
    """The request handler of the process that tries the SDK, which answers whether it can be configured."""

    def __call__(self, _: object) -> Iterator[Support]:
        """Yield once: whether the SDK can be configured in this process, or why not."""
        try:
            rocprofiler.configure()
        except UnavailableError as error:
            yield Support(str(error))
        else:
            yield SUPPORTED
