"""A factor fitted to recorded tables, by which each time that the analytical cost model predicts is multiplied.

It applies to kernels like those that were recorded.

The logarithm of measured over predicted seconds is a quadratic form of `features`, fitted by least squares (``python
benchmarks/fit_correction.py``). Its coefficients are stored beside the search space, as
search_spaces/NAME.correction.json; a target without such a file is ranked by the analytical model alone. The same
holds, on any target, for warm operands, layouts and dtypes that no table has, products of a batch or of groups, and
kernels of other templates or backends. Features are clipped to their range in the tables, and no factor exceeds `most`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tritongemm.core.config import AXES, Config
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import TERMS, Floats
from tritongemm.search_spaces.loader import SPACES

# Terms of the analytical model are features but the last, the launch, which is the same for all.
SHARES = TERMS[:-1]
# A term that takes a smaller share of the time counts as this much.
LEAST_SHARE = 1e-3
OPTIONS = ("swap_ab", "ahead", "early", "poll", "prefetch", "epilogue_parts", "share", "pair")
AHEAD_ROWS = 256  # of problems, beyond which the tables have no kernel that fetches ahead
DERIVED = ("waves", "last_wave", "resident", "registers", "from_lds", "in_flight", "loop", "width", "scaled_along_k")

COLUMNS = ("low", "high", "mean", "spread", "linear")  # of a correction: a number for each feature


@dataclass(frozen=True)
class Correction:
    """A fitted correction of one target's times."""

    templates: tuple[str, ...]  # names of the templates it knows
    dtypes: frozenset[tuple[str, str]]  # pairs of dtypes of A and B that it knows
    # low, high: the minimum and maximum of each feature in the tables, [features]
    low: Floats
    high: Floats
    # mean, spread: the value subtracted from each feature, and the divisor after that, [features]
    mean: Floats
    spread: Floats
    linear: Floats  # coefficients of the features, [features]
    products: Floats  # coefficients of the products of two features, [features, features]
    most: float  # the largest logarithm of a factor

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Correction:
        """Read the correction that `to_json` wrote.

        Raises:
            InputError: it has other features than these.
        """
        names = feature_names(data["templates"])
        if data["features"] != names:
            raise InputError("the correction is of other features: fit it again, python benchmarks/fit_correction.py")
        columns = {name: np.array(data[name], np.float64) for name in COLUMNS}
        products = np.zeros((len(names), len(names)))
        products[np.triu_indices(len(names))] = data["products"]
        dtypes = frozenset((a, b) for a, b in data["dtypes"])
        return cls(tuple(data["templates"]), dtypes, products=products, most=float(data["most"]), **columns)

    def to_json(self) -> dict[str, Any]:
        """Return a map of plain lists, with four digits of each number."""
        return {
            "templates": list(self.templates),
            "dtypes": sorted(map(list, self.dtypes)),
            "features": feature_names(self.templates),
            "most": self.most,
            **{name: _rounded(getattr(self, name)) for name in COLUMNS},
            "products": _rounded(self.products[np.triu_indices(len(self.products))]),
        }

    def covers(self, problem: Problem) -> bool:
        """Say whether there were tables of problems of this kind."""
        dense = problem.batch == 1 and problem.groups is None and problem.layout == "TN" and not problem.microscaled
        return dense and (problem.a.type.name, problem.b.type.name) in self.dtypes

    def scaled(self, rows: Floats) -> Floats:
        """Return features as the fit uses them: clipped to the range of the tables, and centred, [n, features]."""
        return np.asarray((np.clip(rows, self.low, self.high) - self.mean) / self.spread)

    def factors(self, configs: Sequence[Config], rows: Floats) -> Floats:
        """Return the factors for the analytical model's seconds, [n]."""
        unit = self.scaled(rows)
        logs = np.clip(unit @ self.linear + ((unit @ self.products) * unit).sum(axis=1), -self.most, self.most)
        known = [c.is_generated and c.template in self.templates for c in configs]
        return np.where(np.tile(known, len(rows) // len(known)), np.exp(logs), 1.0)


@cache
def fitted(target: str) -> Correction | None:
    """Return the correction of a target by its name; None if there is none.

    Raises:
        InputError: it has other features than these.
    """
    path = SPACES / f"{target}.correction.json"
    return Correction.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def feature_names(templates: Sequence[str]) -> list[str]:
    """Return the names of the columns of `features`."""
    return [*(f"share_{t}" for t in SHARES), *AXES, *DERIVED, *OPTIONS, *(f"is_{t}" for t in templates)]


@dataclass(frozen=True)
class Demand:
    """The quantities of the analytical model that features are computed from, one column per candidate."""

    axes: Floats  # values of `core.config.AXES`, [len(AXES), n]
    terms: Floats  # seconds of each of `TERMS`, [n, len(TERMS)]
    seconds: Floats  # of a launch
    resident: Floats  # programs that share a compute unit
    registers: Floats  # 32-bit registers that a thread needs
    from_lds: Floats  # 1 where matrix instructions read LDS themselves, else 0
    traffic: Floats  # bytes that a program loads in one iteration
    stages: Floats  # blocks of K whose loads are in flight, plus the one being multiplied
    tiles: Floats  # of C
    loop: Floats  # K iterations of a tile


def features(
    configs: Sequence[Config], problem: Problem, target: Target, demand: Demand, templates: Sequence[str]
) -> Floats:
    """Return the inputs of a correction, [n, features], in the order of `feature_names`."""
    split = np.maximum(demand.axes[AXES.index("split_k")], 1)
    waves, settings = demand.tiles * split / target.compute_units, _settings(configs, templates)
    rows = len(demand.seconds)
    derived = [
        np.log2(waves),
        waves / np.ceil(waves),
        np.log2(np.maximum(1, demand.resident)),
        np.log2(demand.registers),
        demand.from_lds,
        np.log2(np.maximum(1, demand.stages - 1) * demand.traffic * np.maximum(1, demand.resident)),
        np.log2(np.ceil(demand.loop / split)),
        np.full(rows, problem.a.type.width),
        np.full(rows, float(problem.scale_depth > 0)),
    ]
    shares = np.log(np.maximum(LEAST_SHARE, demand.terms[:, : len(SHARES)] / demand.seconds[:, None]))
    if min(problem.m, problem.n) > AHEAD_ROWS:
        settings[:, OPTIONS.index("ahead")] = 0
    settings = np.tile(settings, (rows // len(configs), 1))
    return np.hstack([shares, np.log2(np.maximum(demand.axes, 0.5)).T, np.stack(derived, axis=1), settings])


def _settings(configs: Sequence[Config], templates: Sequence[str]) -> Floats:
    """Return the options of each config, 0 where it has none of a name, and 1 for its template, else 0."""
    places: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    which = [places.setdefault((c.template, c.options), len(places)) for c in configs]
    rows = []
    for template, options in places:
        given = dict(options)
        rows.append([*(given.get(name, 0) for name in OPTIONS), *(template == t for t in templates)])
    return np.array(rows, np.float64)[which]


def _rounded(values: Floats) -> list[float]:
    return [float(f"{v:.4g}") for v in values]
