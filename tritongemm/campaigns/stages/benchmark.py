"""Stage: merged results → times of reference and tuned kernels, in fresh processes that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tritongemm.campaigns.benchmark import run_benchmark
from tritongemm.campaigns.measuring import OpenTools


class MeasuredCampaign(Protocol):
    """What the stage needs of a campaign."""

    @property
    def folder(self) -> Path:
        """Where its files lie."""

    @property
    def open_tools(self) -> OpenTools:
        """What it measures with."""

    def say(self, text: str) -> None:
        """Tell the user."""


def run(campaign: MeasuredCampaign) -> None:
    """Measure the campaign's results beside the library."""
    run_benchmark(campaign.folder, campaign.open_tools, campaign.say)
