"""Timer: kernel records of CUPTI, in process, on NVIDIA; gaps between launches are not in it."""

from __future__ import annotations

from tritongemm.core.errors import TritonGemmError
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.driver import Device
from tritongemm.hip_ext.profilers import cupti
from tritongemm.measure.timers._traced import TracedTimer

LABEL = "cupti"
VENDOR = "nvidia"
SCREEN = "events"  # a fifth of the cost of a trace, and good enough to pick finalists
KEEPS_CODE = True  # see hip_ext/cupti: names are right only while nothing is unloaded


def unavailable() -> str | None:
    """Why CUPTI can't trace here, or None."""
    try:
        driver.open_driver(VENDOR)
        prepare()
    except TritonGemmError as error:
        return str(error)
    return None


def prepare() -> None:
    """Register with CUPTI and enable it, before the process loads code.

    Raises:
        UnavailableError: no CUPTI, or one that this driver refuses.
        DriverError: it can't be enabled.
    """
    cupti.open_tracer().enable()


class Timer(TracedTimer):
    """See `TracedTimer`.

    Args:
        device: waited for.
        stream: handle of the stream the graphs run on.
    """

    def __init__(self, device: Device, stream: int) -> None:
        super().__init__(cupti.open_tracer(), device.synchronize, stream)
