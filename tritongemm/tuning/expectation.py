"""What candidates are expected to take at one M, from what was measured at other M of the same product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.config import Config
from tritongemm.core.target import Target
from tritongemm.plugins.validity import check_config
from tritongemm.search.cost_model import model as cost_model
from tritongemm.tuning import roster
from tritongemm.workloads.m_spans import MSpan

_NEIGHBOURS = 3  # Measured algorithms that an expectation is the mean of.
_SIDE_ELEMENTS = 64  # What reading the sides of a tile costs, in columns of its area; from cuBLASLt's on an H200.
_OPTION_DISTANCE = 0.25  # How far two algorithms lie apart that differ in one option, as a logarithm of a tile's side.
_M_DISTANCE = 0.5  # The same of a factor e between two M.
_ROOFLINE_SHARE = 0.8  # No kernel is expected to take less than this share of the least time by the data sheet.

_Floats = NDArray[np.float64]


class Expectation:
    """Times of one product as far as they are known, and those that follow from them.

    Kernels that the cost model knows are scaled by the ratio that it expects. A library's algorithms are scaled by the
    waves of their tiles, from those measured that are most like them: what wins where M is large has the tile that M
    fits into with the least waste, so it is another for every few M.

    Args:
        span: the product.
        target: facts of the device.
    """

    def __init__(self, span: MSpan, target: Target) -> None:
        self._span, self._target = span, target
        self._kernels: dict[int, dict[Config, float]] = {}
        self._algorithms: list[tuple[Config, int, float]] = []

    def note(self, m: int, seconds: Mapping[Config, float]) -> None:
        """Take note of times that were measured at an M."""
        self._kernels[m] = {c: s for c, s in seconds.items() if roster.is_searched(c.backend)}
        self._algorithms += [(c, m, s) for c, s in seconds.items() if _has_tile(c)]

    def kernels(self, m: int, searched: Sequence[int]) -> dict[Config, float]:
        """Seconds expected at an M of the kernels of searched M, the fastest first."""
        expected: dict[Config, list[float]] = {}
        for known in searched:
            for config, seconds in self._scaled(known, m).items():
                expected.setdefault(config, []).append(seconds)
        return _ranked({config: fmean(each) for config, each in expected.items()})

    def algorithms(self, m: int, offered: Iterable[Config]) -> dict[Config, float]:
        """Seconds expected at an M of the algorithms that a library offers there, the fastest first."""
        candidates = list(dict.fromkeys(filter(_has_tile, offered)))
        if not self._algorithms or not candidates:
            return {}
        work = self._work(candidates, [m] * len(candidates))
        configs, ms, seconds = zip(*self._algorithms, strict=True)
        rates = np.log(np.array(seconds) / self._work(configs, ms))
        theirs, ours = _features(configs), _features(candidates)
        distance = np.abs(ours[:, None, :] - theirs[None, :, :]).sum(axis=2)
        distance += _M_DISTANCE * np.abs(np.log(m / np.array(ms)))[None, :]
        distance += _OPTION_DISTANCE * _differing(candidates, configs)
        nearest = np.argsort(distance, axis=1, kind="stable")[:, :_NEIGHBOURS]
        weights = 1 / (0.1 + np.take_along_axis(distance, nearest, axis=1))
        rate = np.exp((weights * rates[nearest]).sum(axis=1) / weights.sum(axis=1))
        problem = self._span.at(m)
        least = _ROOFLINE_SHARE * self._target.roofline_seconds(problem.flops, problem.bytes, problem.a)
        return _ranked(dict(zip(candidates, np.maximum(rate * work, least).tolist(), strict=True)))

    def _scaled(self, known: int, m: int) -> dict[Config, float]:
        """Seconds of kernels at an M: those measured at another, times the ratio that the cost model expects."""
        problem = self._span.at(m)
        measured = {c: s for c, s in self._kernels[known].items() if check_config(c, problem, self._target)}
        here, there = (cost_model.rank(measured, one, self._target) for one in (problem, self._span.at(known)))
        before = dict(zip(there.configs, there.seconds.tolist(), strict=True))
        return {c: measured[c] * s / before[c] for c, s in zip(here.configs, here.seconds.tolist(), strict=True)}

    def _work(self, configs: Sequence[Config], ms: Sequence[int]) -> _Floats:
        """Elements that a compute unit computes one after the other, of algorithms at their M."""
        block_m, block_n, split = (np.array([getattr(c, a) for c in configs], float) for a in _TILE)
        tiles = np.ceil(np.array(ms) / block_m) * np.ceil(self._span.problem.n / block_n) * split
        waves = np.ceil(tiles / self._target.compute_units)
        result: _Floats = waves * (block_m * block_n + _SIDE_ELEMENTS * (block_m + block_n)) / split
        return result


_TILE = ("block_m", "block_n", "split_k")
_PLACES = ("index", "version")  # where an algorithm was found in a list, not which it is


def _has_tile(config: Config) -> bool:
    return roster.is_library(config.backend) and bool(config.block_m and config.block_n)


def _features(configs: Sequence[Config]) -> _Floats:
    sides: _Floats = np.log(np.array([[getattr(c, axis) for axis in _TILE] for c in configs], float))
    return sides


def _differing(ours: Sequence[Config], theirs: Sequence[Config]) -> _Floats:
    """Number of options in which each of ours differs from each of theirs."""
    names = sorted(
        {name for c in (*ours, *theirs) for name, _ in c.options if name not in (*_PLACES, "tile", "splitk")}
    )

    def columns(configs: Sequence[Config]) -> NDArray[np.int64]:
        rows = [[dict(c.options).get(name, -1) for name in names] for c in configs]
        return np.array(rows, np.int64).reshape(len(rows), len(names))

    result: _Floats = (columns(ours)[:, None, :] != columns(theirs)[None, :, :]).sum(axis=2).astype(float)
    return result


def _ranked(expected: Mapping[Config, float]) -> dict[Config, float]:
    return dict(sorted(expected.items(), key=lambda pair: pair[1]))
