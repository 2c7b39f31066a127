"""The best Triton config of our tuner, whichever won."""

from __future__ import annotations

from competitors import Ready, Refused, Setting
from competitors.ours import launched

NOTE = "the best Triton config of our tuner, whichever won"


def prepare(setting: Setting) -> Ready:
    """Load the best recorded Triton config."""
    tuned, problem = setting.tuned, setting.problem
    config = tuned.triton.get(problem)
    if config is None:
        raise Refused(tuned.missing(problem) if problem not in tuned.records else "no journal names a Triton config")
    detail = {"config": config.name}
    record = tuned.records.get(problem)
    if "ours" in setting.entered and record and record.winner == "triton" and record.config == config:
        return Ready(detail=detail, same="ours")
    return launched(setting, config, None, detail)
