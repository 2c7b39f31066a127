"""Results are merged whatever happens meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import ONE, record, rows, take
from tests.support.tables import each
from tritongemm.tune.requested_run import TuningStopped, merging


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Ctrl-C is heeded, wherever the tests run."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only a main thread handles signals")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@each("ended", [KeyboardInterrupt, ValueError, None])
def test_ctrl_c_ends_no_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: type[BaseException] | None
) -> None:
    """It comes while the file is being replaced, after a run that was stopped, failed or came to its end."""
    path, profiles = tmp_path / "out.yaml", []
    with take(path) as store:
        replace = os.replace

        def interrupted(old: Path, new: Path) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            replace(old, new)

        monkeypatch.setattr(os, "replace", interrupted)
        try:
            with merging(store, [ONE], lambda: profiles.append(1)):
                store.add_record(record(ONE))
                if ended:
                    raise ended
        except (KeyboardInterrupt, ValueError) as error:
            assert type(error) is (TuningStopped if ended is KeyboardInterrupt else ended)
    assert rows(path) == [record(ONE)]
    assert bool(profiles) is (ended is not ValueError)
