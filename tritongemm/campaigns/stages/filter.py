"""Stage: measured times → what truly gained, and by how much."""

from __future__ import annotations

from tritongemm.campaigns.filtering import KEPT, run_filter
from tritongemm.campaigns.stages.benchmark import MeasuredCampaign


def run(campaign: MeasuredCampaign) -> None:
    """Keep what gained, and print the uplift."""
    run_filter(campaign.folder, campaign.say)


def why_again(campaign: MeasuredCampaign) -> str:
    """Return why the stage is done again; "" where it is not."""
    return "" if (campaign.folder / KEPT).exists() else f"{KEPT} is not there: done again"
