"""Graphs of CUDA and HIP: what is called while one is captured runs again at each launch, without Python."""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tritongemm.workloads.capturing.recorder import Recorder, Tally


class GraphReplays:
    """Adds the products of a graph again each time it is launched."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: dict[int, int] = {}  # calls of each tally when the last capture began
        self._held: WeakKeyDictionary[Any, list[tuple[Tally, int]]] = WeakKeyDictionary()
        self._originals: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Replace the methods of graphs by those that count replays."""
        graphs = torch.cuda.CUDAGraph
        for name, watch in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            self._originals[name] = getattr(graphs, name)
            setattr(graphs, name, _followed(self._originals[name], watch))

    def remove(self) -> None:
        """Put the methods of graphs back."""
        for name, original in self._originals.items():
            setattr(torch.cuda.CUDAGraph, name, original)

    def _begin(self, graph: Any) -> None:
        self._before = {id(tally): tally.calls for _, tally in self._recorder}
        self._recorder.spreads.in_graph = True

    def _end(self, graph: Any) -> None:
        grown = ((tally, tally.calls - self._before.get(id(tally), 0)) for _, tally in self._recorder)
        self._held[graph] = [(tally, calls) for tally, calls in grown if calls]
        self._recorder.spreads.in_graph = False
        graph.tritongemm_writes_to = self._recorder.spreads.memory  # also when it is launched after the capture's end

    def _replay(self, graph: Any) -> None:
        for tally, calls in self._held.get(graph, ()):
            tally.replayed += calls


def _followed(original: Callable[..., Any], watch: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        watch(graph)
        return result

    return call
