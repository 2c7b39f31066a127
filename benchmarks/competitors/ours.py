"""What our tuner recorded: the winner's binary, or the library's call where the record says that the library won."""

from __future__ import annotations

from competitors import BASELINE, Ready, Refused, Setting
from tritongemm.core.config import Config
from tritongemm.measure.jobs import LaunchCandidate

NOTE = "the winner that our tuner recorded; where that is the library, its call, at a ratio of 1 by construction"


def prepare(setting: Setting) -> Ready:
    """Load the recorded winner."""
    tuned, problem = setting.tuned, setting.problem
    record = tuned.records.get(problem)
    if record is None:
        raise Refused(tuned.missing(problem))
    seconds, detail = tuned.seconds.get(problem), {"winner": record.winner, "config": record.config.name}
    if record.winner == BASELINE:
        return Ready(seconds=seconds, detail=detail, same=BASELINE)
    return launched(setting, record.config, seconds, detail)


def launched(setting: Setting, config: Config, seconds: float | None, detail: dict[str, str]) -> Ready:
    """The calls of one config, compiled or a library's.

    Raises:
        Refused: it did not compile.
    """
    launch = setting.tuned.launch(setting.problem, config, setting.target)
    prepared = setting.bench.prepare(LaunchCandidate(config, launch), setting.bench.copies)
    return Ready(prepared.calls, seconds, detail, release=prepared.unload)
