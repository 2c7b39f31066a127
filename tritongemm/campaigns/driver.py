"""The stages of a campaign in their order: each is done once, and what was killed goes on where it was."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from tritongemm.campaigns import stages, state
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.state import CampaignState
from tritongemm.core.errors import InputError, OutputError, UnavailableError

STAGES = ("configs", "tune", "merge", "benchmark", "filter")


def run_campaign(campaign: Campaign, only: str = "") -> None:
    """Do the stages that are not done, or one of them whether it is done or not.

    Args:
        campaign: where, of which log, and with what.
        only: name of the one stage; "" for all.

    Raises:
        InputError: there is no campaign in the folder and no log, or a stage before the one asked for is not done.
        OutputError: the folder holds another log's campaign, or another campaign runs there.
        UnavailableError: a stage is no part of this installation.
    """
    with state.holding(campaign.folder):
        now = _begin(campaign)
        now.write(campaign.folder)
        for stage in (only,) if only else STAGES:
            if stage in now.done and not only:
                campaign.say(f"{stage}: done already (--only {stage} does it again)")
                continue
            _require_before(stage, now, campaign)
            now = now.without(STAGES[STAGES.index(stage) :])
            now.write(campaign.folder)
            _run_stage(stage, campaign)
            now = replace(now, done=(*now.done, stage))
            now.write(campaign.folder)


def _begin(campaign: Campaign) -> CampaignState:
    """What is known of the folder, or of the log where the folder has no campaign yet."""
    found = CampaignState.read(campaign.folder)
    if campaign.log is None:
        if found is None:
            raise InputError(f"{campaign.folder} has no campaign: name the LOG of what the job called")
        asked = replace(found, target=campaign.target.name, threshold=campaign.threshold)
    else:
        asked = CampaignState.of(campaign.log, campaign.target.name, campaign.threshold)
    if found is None:
        return asked
    for what, theirs, ours in (("log", found.digest, asked.digest), ("target", found.target, asked.target)):
        if theirs != ours:
            other = found.log if what == "log" else theirs
            raise OutputError(
                f"{campaign.folder} has the campaign of another {what}, {other}: choose another folder with -o"
            )
    if campaign.log is not None and found.threshold != asked.threshold:
        campaign.say(f"the threshold was {found.threshold:g} % and is {asked.threshold:g} %: all stages are done again")
        return asked
    return replace(found, log=asked.log)


def _require_before(stage: str, now: CampaignState, campaign: Campaign) -> None:
    missing = [name for name in STAGES[: STAGES.index(stage)] if name not in now.done]
    if missing:
        raise InputError(f"{campaign.folder}: the stage {stage} needs {missing[0]}, which is not done; run that first")


def _run_stage(stage: str, campaign: Campaign) -> None:
    """Do one stage, which is a module of the folder of stages."""
    if stage not in {module.name for module in pkgutil.iter_modules(stages.__path__)}:
        raise UnavailableError(
            f"the stage {stage} is not part of this installation; what is done so far is in {campaign.folder}"
        )
    importlib.import_module(f"{stages.__name__}.{stage}").run(campaign)
