"""The class `Expectation`: seconds expected of kernels and algorithms at an M where they were not measured."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.config import Config
from tritongemm.core.target import Target
from tritongemm.search.cost_model import model as cost_model
from tritongemm.tune import roster
from tritongemm.workloads.m_spans import MSpan

_NEIGHBOURS = 3  # measured algorithms that an expectation averages
_SIDE_ELEMENTS = 64  # cost of reading the sides of a tile, in columns of its area; from cuBLASLt's on an H200
_OPTION_DISTANCE = 0.25  # distance of two algorithms that differ in one option, as a logarithm of a tile's side
_M_DISTANCE = 0.5  # the same of a factor e between two M
_TILE = ("block_m", "block_n", "split_k")
_OPTIONS_COMPARED = ("algo", "cluster", "custom", "stages", "swizzle")

_Floats = NDArray[np.float64]


class Expectation:
    """The measured times of one product over M, and the times expected from them.

    Kernels that the cost model knows are scaled by its predicted ratio. A library's algorithms are scaled by the waves
    of their tiles, from the most similar measured algorithms: at large M the winner has the tile that fits M with the
    least waste, so it changes every few M.
    """

    def __init__(self, span: MSpan, target: Target) -> None:
        self._span, self._target = span, target
        self._kernels: dict[int, dict[Config, float]] = {}  # seconds over those that the model expects, by M
        self._fitting: list[Config] = []
        self._algorithms: list[tuple[Config, int, float]] = []
        self._features = np.empty((0, len(_TILE)))  # of the algorithms, as `_option_rows`
        self._option_rows = np.empty((0, len(_OPTIONS_COMPARED)), np.int64)

    def note(self, m: int, seconds: Mapping[Config, float]) -> None:
        """Add times that were measured at an M."""
        kernels = {c: s for c, s in seconds.items() if roster.is_searched(c.backend)}
        expected = self._modelled(kernels, m)
        self._kernels[m] = {config: kernels[config] / expected[config] for config in kernels}
        algorithms = [(c, m, s) for c, s in seconds.items() if _has_tile(c)]
        if algorithms:
            self._algorithms += algorithms
            configs = [config for config, _, _ in algorithms]
            self._features = np.concatenate([self._features, _features(configs)])
            self._option_rows = np.concatenate([self._option_rows, _options(configs)])

    def offer(self, kernels: Iterable[Config]) -> None:
        """Add kernels that no searched M has measured, with tiles that fit others."""
        self._fitting += kernels

    def kernels(self, m: int, searched: Sequence[int]) -> list[Config]:
        """List the kernels of searched M, and those that were offered, in the order of their expected time at an M."""
        known = [self._kernels[one] for one in searched]
        nearest = sorted(self._kernels, key=lambda one: abs(np.log(m / one)))

        def ratio(config: Config) -> float:
            found = [ratios[config] for ratios in known if config in ratios]
            found = found or [self._kernels[one][config] for one in nearest if config in self._kernels[one]][:1]
            alike = (r for ratios in known for c, r in ratios.items() if c.template == config.template)
            return fmean(found or [*alike] or [r for ratios in known for r in ratios.values()] or [1.0])

        modelled = self._modelled(dict.fromkeys([*(c for ratios in known for c in ratios), *self._fitting]), m)
        expected = {config: seconds * ratio(config) for config, seconds in modelled.items()}
        return sorted(expected, key=expected.__getitem__)

    def algorithms(self, m: int, offered: Iterable[Config]) -> list[Config]:
        """List the algorithms that a library offers at an M in the order of their expected time there."""
        candidates = list(dict.fromkeys(filter(_has_tile, offered)))
        if not self._algorithms or not candidates:
            return candidates
        work = self._work(candidates, [m] * len(candidates))
        configs, ms, seconds = zip(*self._algorithms, strict=True)
        rates = np.log(np.array(seconds) / self._work(configs, ms))
        distance = np.abs(_features(candidates)[:, None, :] - self._features[None, :, :]).sum(axis=2)
        distance += _M_DISTANCE * np.abs(np.log(m / np.array(ms)))[None, :]
        distance += _OPTION_DISTANCE * (_options(candidates)[:, None, :] != self._option_rows[None, :, :]).sum(axis=2)
        nearest = np.argpartition(distance, min(_NEIGHBOURS, len(ms)) - 1, axis=1)[:, :_NEIGHBOURS]
        weights = 1 / (0.1 + np.take_along_axis(distance, nearest, axis=1))
        expected = np.exp((weights * rates[nearest]).sum(axis=1) / weights.sum(axis=1)) * work
        return [candidates[place] for place in np.argsort(expected, kind="stable")]

    def _modelled(self, configs: Iterable[Config], m: int) -> dict[Config, float]:
        """Return the seconds that the cost model expects of kernels at an M."""
        predictions = cost_model.rank(configs, self._span.at(m), self._target)
        return dict(zip(predictions.configs, predictions.seconds.tolist(), strict=True))

    def _work(self, configs: Sequence[Config], ms: Sequence[int]) -> _Floats:
        """Return the elements that a compute unit computes one after the other, of algorithms at their M."""
        block_m, block_n, split = (np.array([getattr(c, a) for c in configs], float) for a in _TILE)
        problem = self._span.problem
        tiles = np.ceil(np.array(ms) / block_m) * np.ceil(problem.n / block_n) * problem.batch * split
        waves = np.ceil(tiles / self._target.compute_units)
        result: _Floats = waves * (block_m * block_n + _SIDE_ELEMENTS * (block_m + block_n)) / split
        return result


def _has_tile(config: Config) -> bool:
    return roster.is_library(config.backend) and bool(config.block_m and config.block_n)


def _features(configs: Sequence[Config]) -> _Floats:
    sides: _Floats = np.log(np.array([[getattr(c, axis) for axis in _TILE] for c in configs], float))
    return sides


def _options(configs: Sequence[Config]) -> NDArray[np.int64]:
    return np.array([[c.option(name, -1) for name in _OPTIONS_COMPARED] for c in configs], np.int64)
