"""Timer: kernel records of rocprofiler-sdk, in process, on AMD; gaps between launches are not in it."""

from __future__ import annotations

from collections.abc import Iterator

from tritongemm.core.errors import UnavailableError
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.driver import Device
from tritongemm.hip_ext.profilers import rocprofiler
from tritongemm.measure.timers._traced import TracedTimer
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

LABEL = "rocprofiler"
VENDOR = "amd"
SCREEN = "events"  # a fifth of the cost of a trace, and good enough to pick finalists
_PROBE_SECONDS = 60.0


def unavailable() -> str | None:
    """Why the SDK can't trace here, or None.

    It takes tools on only before a process first uses the GPU, and may abort one that comes at the wrong time: a
    process of its own is asked.
    """
    try:
        driver.open_driver(VENDOR)
    except UnavailableError as error:
        return str(error)
    child = WorkerProcess("tritongemm.measure.timers.rocprofiler:Probe")
    try:
        answers: list[str | None] = list(child.ask(None, _PROBE_SECONDS))
        return answers[0]
    except (WorkerDied, WorkerTimeout, WorkerError) as error:
        return f"rocprofiler-sdk could not be asked: {error}"
    finally:
        child.kill()


class Probe:
    """What the asked process does: answers why the SDK can't be configured in it, or None."""

    def __call__(self, _: object) -> Iterator[str | None]:
        try:
            prepare()
        except UnavailableError as error:
            yield str(error)
        else:
            yield None


def prepare() -> None:
    """Register with the SDK; only before the process first uses the GPU.

    Raises:
        ConfigurationLockedError: too late, or another profiler is attached.
        UnavailableError: no SDK, one of an unknown version, or one that refuses.
    """
    rocprofiler.configure()


class Timer(TracedTimer):
    """See `TracedTimer`.

    Args:
        device: waited for.
        stream: handle of the stream the graphs run on.
    """

    def __init__(self, device: Device, stream: int) -> None:
        super().__init__(rocprofiler.configure(), device.synchronize, stream)
