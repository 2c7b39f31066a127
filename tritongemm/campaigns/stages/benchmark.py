"""Stage: merged results → times of reference and tuned kernels, in fresh processes that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tritongemm.campaigns.benchmark import RAW, run_benchmark
from tritongemm.campaigns.measuring import OpenTools
from tritongemm.campaigns.raw_results import read_products
from tritongemm.core.errors import InputError


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

    def fail(self, text: str) -> None:
        """Tell the user what went wrong, and go on."""


def run(campaign: MeasuredCampaign) -> None:
    """Measure the campaign's results beside the library."""
    for product in run_benchmark(campaign.folder, campaign.open_tools, campaign.say):
        if product.failure:
            campaign.fail(f"not compared: {product.problem}: {product.failure}")


def why_again(campaign: MeasuredCampaign) -> str:
    """Why the stage is done again; "" where it is not: what a lost GPU left is measured, and nothing else."""
    try:
        failed = sum(bool(product.failure) for product in read_products(campaign.folder / RAW))
    except InputError as error:
        return f"{error}: done again"
    return f"{failed} GEMMs could not be compared: done again" if failed else ""
