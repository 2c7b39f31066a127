"""Timer: no clock at all, the analytical model's prediction; its label keeps it from passing for a measurement."""

from __future__ import annotations

from tritongemm import rank
from tritongemm.problem import Problem
from tritongemm.target import Target
from tritongemm.trial import Built

LABEL = "model"


def predict(problem: Problem, target: Target, built: Built) -> float:
    """Predicted seconds of one launch, from the config and what its binary says."""
    return rank.predict(built.config, problem, target, built).seconds
