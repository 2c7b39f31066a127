"""PyTorch's TunableOp: on while it tunes, runs and is captured, so that the baseline never sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from competitors import Ready, Setting
from competitors.torch import operations

NOTE = "the same call with torch.cuda.tunable on and tuned for the size; detail.picked names its choice"


@contextmanager
def enabled(tuning: bool) -> Iterator[None]:
    """TunableOp on, and off again."""
    from torch.cuda import tunable

    tunable.enable(True)
    tunable.tuning_enable(tuning)
    try:
        yield
    finally:
        tunable.tuning_enable(False)
        tunable.enable(False)


def prepare(setting: Setting) -> Ready:
    """Tune PyTorch's call with TunableOp."""
    import torch
    from torch.cuda import tunable

    tunable.set_filename(str(setting.folder / "tunableop.csv"))
    if hasattr(tunable, "write_file_on_exit"):  # the folder is gone by then
        tunable.write_file_on_exit(False)
    calls = operations(setting)
    calls[0]()
    torch.cuda.synchronize()
    before = tunable.get_results()
    started = time.perf_counter()
    with enabled(tuning=True):
        calls[0]()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        picked = [list(map(str, entry)) for entry in tunable.get_results() if entry not in before]
    return Ready(calls, seconds, {"picked": picked}, partial(enabled, False))
