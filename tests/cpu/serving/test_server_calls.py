"""What decides whether a server's own kernel or a tuned one computes a call."""

from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.nouns import Caplog, Patch, each
from tritongemm.serving import server_calls


@each("can", [True, False])
def test_few_rows_are_timed_in_a_graph(monkeypatch: Patch, can: bool) -> None:
    """What reads the cache empty beside each call is not counted; where a call can't be captured, events time it.

    PyTorch's allocator keeps a pool open whose capture failed, and empties no cache then. What the failed call left on
    the other stream is waited for, and nothing is captured again.
    """
    clock, launched, begun, waited, ended = [0.0], list[float](), list[Any](), list[Any](), list[Any]()

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            self.first = len(launched)
            begun.append(pool)

        def capture_end(self) -> None:
            self.seconds = sum(launched[self.first :])
            if not can:
                raise RuntimeError("a call that can't be captured")

        def replay(self) -> None:
            clock[0] += self.seconds + 1e-5

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at) * 1e3

    stream, ours = SimpleNamespace(wait_stream=lambda other: None), SimpleNamespace(wait_stream=waited.append)
    of_cuda: dict[str, Any] = {
        "CUDAGraph": Graph, "Event": Event, "stream": lambda stream: nullcontext(), "current_device": lambda: 0,
        "current_stream": lambda: ours, "get_device_properties": lambda: SimpleNamespace(L2_cache_size=64),
    }  # fmt: skip
    for name, stand_in in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    cold = SimpleNamespace(amax=lambda: launched.append(3e-5))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **named: cold)
    captures = cache(lambda index: (stream, (0, index + 1), None))
    monkeypatch.setattr(server_calls, "_captures", captures)
    monkeypatch.setattr(server_calls, "_failed", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: ended.append(given), raising=False)
    monkeypatch.setattr(server_calls, "_seconds", lambda call: 7.0)
    both: Any = tuple(partial(launched.append, seconds) for seconds in (5e-6, 6e-6))
    key: tuple[Any, ...] = ("product", (16).bit_length(), torch.bfloat16, (256, 512))
    assert server_calls._race(key, lambda: both) == can
    assert not server_calls._race(("mixture", *key[1:]), lambda: both)
    count = len(begun)
    assert ended == ([] if can else [(0, (0, 1))]) and waited == [stream] and len(server_calls._failed) == len(ended)
    with server_calls._capturing:  # Another thread is at it.
        assert not server_calls._race(key, lambda: both) and len(begun) == count
    assert server_calls._race(key, lambda: both) == can and (len(begun) > count) == can


def test_a_race_that_fails_leaves_the_call_to_the_server(monkeypatch: Patch) -> None:
    def prepare() -> Any:
        raise AssertionError("an error of a server's kernel")

    assert not server_calls._race(("product", 1, torch.bfloat16, (256, 512)), prepare)


@each(("more", "named"), [((), "16 to 31"), ((True,), "16 to 31 of no multiple of 4"), ((False,), "16 to 31 of multi")])
def test_a_race_says_of_which_m_it_is(monkeypatch: Patch, caplog: Caplog, more: tuple[bool, ...], named: str) -> None:
    monkeypatch.setattr(server_calls, "_seconds_by_events", lambda both: [1e-6, 2e-6])
    monkeypatch.setattr("tritongemm.system.settings.logs_choices", lambda: True)
    monkeypatch.setattr(server_calls, "_failed", [None])
    with caplog.at_level("INFO", "tritongemm"):
        assert server_calls._race(("product", 5, torch.bfloat16, (256, 512), *more), lambda: (None, None))  # type: ignore[return-value,arg-type]
    assert f"weights (256, 512) with M {named}" in caplog.text and "tuned 1.0 us" in caplog.text
