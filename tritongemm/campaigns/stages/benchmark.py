"""Stage: merged results → times of reference and tuned kernels, in new processes that take turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tritongemm.campaigns.benchmark import RAW, run_benchmark
from tritongemm.campaigns.measuring import OpenTools
from tritongemm.campaigns.raw_results import read_products
from tritongemm.core.errors import InputError


class MeasuredCampaign(Protocol):
    """The parts of a `Campaign` that measuring stages use."""

    @property
    def folder(self) -> Path:
        """The folder of the campaign's files."""

    @property
    def open_tools(self) -> OpenTools:
        """A function that opens the tools that measure."""

    @property
    def say(self) -> Callable[[str], None]:
        """A function that prints a line."""

    def fail(self, text: str) -> None:
        """Report a fault of one product; the others go on."""


def run(campaign: MeasuredCampaign) -> None:
    """Measure the campaign's results beside the library."""
    for product in run_benchmark(campaign.folder, campaign.open_tools, campaign.say):
        if product.failure:
            campaign.fail(f"not compared: {product.problem}: {product.failure}")


def why_again(campaign: MeasuredCampaign) -> str:
    """Return why the stage runs again; "" where it does not: only what a lost GPU left is measured."""
    try:
        failed = sum(bool(product.failure) for product in read_products(campaign.folder / RAW))
    except InputError as error:
        return f"{error}: done again"
    return f"{failed} GEMMs could not be compared: done again" if failed else ""
