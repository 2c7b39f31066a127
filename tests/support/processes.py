import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped by init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def becomes_true(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something holds within some seconds; ten are the longest that a process may outlive its run."""
    limit = time.monotonic() + seconds
    while not holds() and time.monotonic() < limit:
        time.sleep(0.01)
    return holds()
