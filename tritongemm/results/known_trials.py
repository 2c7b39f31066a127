"""Holds the trials of a journal by problem, whose lines are parsed on request."""

from __future__ import annotations

import warnings
from pathlib import Path

from tritongemm.core.errors import DamagedFileWarning, InputError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.results.schema import UnreadTrial


class KnownTrials:
    """The trials of a run and of those before it. It has no lock: one thread uses it at a time.

    Args:
        journal: where they are from, for messages.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._read: dict[Problem, dict[tuple[str, str], Trial]] = {}
        self._unread: dict[Problem, list[UnreadTrial]] = {}

    def take(self, problem: Problem, trial: UnreadTrial) -> None:
        """Add a trial's line of the journal."""
        self._unread.setdefault(problem, []).append(trial)

    def of(self, problem: Problem) -> dict[tuple[str, str], Trial]:
        """Return the trials of a problem, by config name and stage; the caller may add to the dictionary.

        A line that can't be read is passed over with a warning, so that its candidate is measured again.
        """
        known = self._read.setdefault(problem, {})
        for unread in self._unread.pop(problem, ()):
            try:
                trial = unread.read()
            except (InputError, KeyError, TypeError, ValueError) as error:
                what = f"{self._journal}: a trial of {problem.key} can't be, and is measured again: {error}"
                warnings.warn(what, DamagedFileWarning, stacklevel=3)
                continue
            known[trial.config.name, trial.stage] = trial
        return known
