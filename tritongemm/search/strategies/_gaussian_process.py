"""A Gaussian process that models how a problem's measured times differ from the analytical model's predictions.

It is a Gaussian process (Matérn 5/2) on the log of measured over predicted seconds. With a hundred rows it ranks unseen
configs at least as well as forests of trees, has an estimate of its uncertainty, and takes milliseconds where they take
tenths of a second.
"""

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Floats, Predictions
from tritongemm.search.strategies._candidates import CandidateSet

Ints = NDArray[np.intp]
# The kernel's length is the likeliest of these, in root-mean-square standard deviations of the features.
LENGTHS = (0.7, 1.0, 1.5, 2.5)
# The share of the variance that no feature explains is the likeliest of these.
NOISES = (0.003, 0.02, 0.1)
# how far the logarithm of a failure's seconds is assumed to be above the predicted one's, at least
FAILURE_LOG_SECONDS = 0.7


def features(kept: CandidateSet, expected: Predictions, problem: Problem, target: Target) -> Floats:
    """Return the features of all configs, one row each: axes, options, derived quantities, and the model's terms."""
    block_m, block_n, block_k, _, split, warps, stages = kept.axes.T
    tiles = np.ceil(problem.m / block_m) * np.ceil(problem.n / block_n) * problem.batch
    waves = tiles * split / target.compute_units
    loop = np.ceil(problem.k / block_k / split)
    derived = [
        np.log2(waves),
        np.log2(np.ceil(waves)),
        waves / np.ceil(waves),
        np.log2(loop),
        np.log2(loop * np.maximum(1, waves)),
        np.log2((block_m * problem.a.type.width + block_n * problem.b.type.width) * block_k * stages),
        np.log2(block_m * block_n / warps),
        np.log2(block_m * block_n),
        np.log2(block_m / block_n),
        np.log2(block_m * block_n / (block_m + block_n)),
    ]
    shares = expected.terms / expected.seconds[:, None]
    return np.hstack([np.log2(kept.axes), np.stack(derived, axis=1), kept.settings, kept.membership, shares])


class Surrogate:
    """Expected times of all kept configs of one problem, given the trials so far."""

    def __init__(self, rows: Floats, prior: Floats) -> None:
        deviation = rows.std(axis=0)
        self.rows = (rows - rows.mean(axis=0))[:, deviation > 0] / deviation[deviation > 0]
        self.prior = prior

    def fit(self, measured: Ints, logs: Floats) -> None:
        """Fit to the candidates with indices `measured`, whose log seconds were `logs` (NaN: failed)."""
        bad = np.maximum(np.nanmax(logs), self.prior[measured] + FAILURE_LOG_SECONDS)
        rest = np.where(np.isnan(logs), bad, logs) - self.prior[measured]
        self.mean, self.scale = float(rest.mean()), max(float(rest.std()), 1e-6)
        unit, known = (rest - self.mean) / self.scale, self.rows[measured]
        width = np.sqrt(max(1, self.rows.shape[1]))
        apart, best = _distances(known, known) / width, -np.inf
        for length in LENGTHS:
            kernel = _matern(apart / length)
            for noise in NOISES:
                noisy = kernel + noise * np.eye(len(kernel))
                factor = np.linalg.cholesky(noisy)
                white = np.linalg.solve(factor, unit)
                likelihood = -0.5 * white @ white - np.log(np.diag(factor)).sum()
                if likelihood > best:
                    best, kept, self._length = likelihood, (factor, white), length * width
        self._whiten = np.linalg.inv(kept[0])
        self._weights = self._whiten.T @ kept[1]
        self._known = known

    def predict(self, wanted: Ints) -> tuple[Floats, Floats]:
        """Return the expected log seconds of candidates, and their standard deviations."""
        cross = self._kernel(self.rows[wanted], self._known)
        mean = cross @ self._weights * self.scale + self.mean + self.prior[wanted]
        variance = 1 - ((self._whiten @ cross.T) ** 2).sum(axis=0)
        return mean, self.scale * np.sqrt(np.maximum(variance, 1e-9))

    def choose(self, wanted: Ints, count: int, exploration: float) -> list[int]:
        """Select the `count` most promising of `wanted`, one after the other.

        Each choice reduces the uncertainty of its neighbours for the next, so a batch does not cluster. `exploration`
        is the standard deviations by which an uncertain candidate is favoured.
        """
        mean, deviation = self.predict(wanted)
        best = np.argsort(mean - exploration * deviation, kind="stable")[: max(400, 8 * count)]
        mean, variance, ids = mean[best], (deviation[best] / self.scale) ** 2, wanted[best]
        rows = self.rows[ids]
        white = self._whiten @ self._kernel(self._known, rows)
        chosen: list[int] = []
        columns: list[Floats] = []  # of the covariance, one for each choice, without what earlier choices explain
        for _ in range(min(count, len(ids))):
            score = mean - exploration * self.scale * np.sqrt(np.maximum(variance, 1e-9))
            score[chosen] = np.inf
            place = int(score.argmin())
            chosen.append(place)
            column = self._kernel(rows, rows[place : place + 1])[:, 0] - white.T @ white[:, place]
            column = column - sum(earlier * earlier[place] for earlier in columns)
            columns.append(column / np.sqrt(max(column[place], 1e-9)))
            variance = variance - columns[-1] ** 2
        return [int(ids[i]) for i in chosen]

    def _kernel(self, left: Floats, right: Floats) -> Floats:
        return _matern(_distances(left, right) / self._length)


def _distances(left: Floats, right: Floats) -> Floats:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0)))


def _matern(apart: Floats) -> Floats:
    scaled = np.sqrt(5) * apart
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))
