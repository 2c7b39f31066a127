"""What decides whether a server's own kernel or a tuned one computes a call."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.nouns import Patch, each
from tritongemm.serving import server_calls


@each("captures", [True, False])
def test_few_rows_are_timed_in_a_graph(monkeypatch: Patch, captures: bool) -> None:
    """What reads the cache empty beside each call is not counted; where a call can't be captured, events time it."""
    clock, launched = [0.0], list[float]()

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            self.first = len(launched)

        def capture_end(self) -> None:
            self.seconds = sum(launched[self.first :])
            if not captures:
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

    stream = SimpleNamespace(wait_stream=lambda other: None)
    of_cuda: dict[str, Any] = {
        "CUDAGraph": Graph, "Event": Event, "stream": lambda stream: nullcontext(), "current_device": lambda: 0,
        "current_stream": lambda: stream, "get_device_properties": lambda: SimpleNamespace(L2_cache_size=64),
    }  # fmt: skip
    for name, stand_in in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    cold = SimpleNamespace(amax=lambda: launched.append(3e-5))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **named: cold)
    monkeypatch.setattr(server_calls, "_captures", lambda index: (stream, (0, 1), None))
    monkeypatch.setattr(server_calls, "_seconds", lambda call: 7.0)
    both: Any = tuple(partial(launched.append, seconds) for seconds in (5e-6, 6e-6))
    key: tuple[Any, ...] = ("product", (16).bit_length(), torch.bfloat16, (256, 512))
    assert server_calls._race(key, lambda: both) == captures
    assert not server_calls._race(("mixture", *key[1:]), lambda: both)
