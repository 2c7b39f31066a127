"""Stage: the configs → tuned results, on all devices at once; a free device takes the next work of any GEMM."""

import time
from collections.abc import Sequence
from contextlib import suppress

from tritongemm.campaigns import tables
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.device_load import describe_loads
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.results.run_files import RunFiles
from tritongemm.tune.run import TuningRun
from tritongemm.workloads import sizes


def run(campaign: Campaign) -> None:
    """Tune every config that is in the folder; what the journal has is not measured again."""
    problems = _read_configs(campaign)
    if not campaign.resume or _are_predictions(campaign):
        _set_aside(campaign)
    started = time.perf_counter()
    with campaign.open_run(problems, campaign.tuned) as tuning:
        known = sum(tuning.store.record(problem) is not None for problem in problems)
        if known:
            campaign.say(f"{known} of {len(problems)} GEMMs are in {campaign.tuned} already")
        failures = _tune(tuning, problems)
        for line in describe_loads(campaign.devices, tuning.evaluators, time.perf_counter() - started):
            campaign.say(line)
    for problem, reason in failures.items():
        campaign.fail(f"failed: {problem.key}: {reason}")
    campaign.say(f"tuned: {len(problems) - len(failures)} of {len(problems)} GEMMs in {campaign.tuned}")
    if len(failures) == len(problems):
        raise InputError(f"{campaign.tuned}: no GEMM could be tuned; the first: {next(iter(failures.values()))}")


def why_again(campaign: Campaign) -> str:
    """Return why the stage runs again; "" where it does not: with a GPU, predictions are measured."""
    if not campaign.resume:
        return "done again, as --no-resume asks"
    if _are_predictions(campaign):
        return "its results are predictions, and a GPU is here: done again"
    wanted, known = _read_configs(campaign), {record.problem for record in _read_tuned(campaign)}
    missing = sum(problem not in known for problem in wanted)
    return f"{missing} of {len(wanted)} GEMMs have no result: done again" if missing else ""


def _are_predictions(campaign: Campaign) -> bool:
    """Return whether the tuned results are predictions that can be measured now."""
    return bool(campaign.devices) and any(record.predicted for record in _read_tuned(campaign))


def _read_tuned(campaign: Campaign) -> list[Record]:
    """Return the results of earlier runs of the stage; none before the first."""
    if not campaign.tuned.exists():
        return []
    rows = sizes.from_file(campaign.tuned, Defaults(fp8_encoding=campaign.target.fp8))
    return [row.record for row in rows if row.record is not None]


def _set_aside(campaign: Campaign) -> None:
    """Rename what was tuned, and begin anew."""
    files = RunFiles(campaign.tuned)
    files.hold()
    try:
        files.set_aside()
    finally:
        files.release()
    campaign.say(f"{campaign.tuned}: set aside as {campaign.tuned}.old")


def _read_configs(campaign: Campaign) -> list[Problem]:
    """Return the problems of the configs; one whose file was deleted is left out."""
    found: dict[Problem, None] = {}
    for gemm in tables.read_gemms(campaign.folder):
        path = campaign.folder / f"{gemm.config}.yaml"
        if not path.exists():
            campaign.say(f"left out: {path} is not there")
            continue
        found |= dict.fromkeys(row.problem for row in sizes.from_file(path, Defaults(fp8_encoding=campaign.target.fp8)))
    if not found:
        raise InputError(f"{campaign.folder} has none of the configs that {tables.GEMMS} lists; run --only configs")
    return list(found)


def _tune(tuning: TuningRun, problems: Sequence[Problem]) -> dict[Problem, str]:
    """Tune, and merge what is done whatever happens; it stays in the journal where even that fails."""
    try:
        failures = tuning.tune(problems)
    except BaseException:
        with suppress(TritonGemmError):  # the first fault is raised
            tuning.store.merge(problems)
        raise
    tuning.store.merge(problems)
    return failures
