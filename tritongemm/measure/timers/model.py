"""Timer: no clock at all, the analytical model's prediction; its label keeps it from passing for a measurement."""

from __future__ import annotations

from tritongemm.core.artifact import Artifact
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model import model as cost_model

LABEL = "model"


def predict(problem: Problem, target: Target, built: Artifact) -> float:
    """Predicted seconds of one launch, from the config and what its binary says."""
    return cost_model.predict(built.config, problem, target, built).seconds
