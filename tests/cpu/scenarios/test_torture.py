"""The short form of the fault campaign: the same tries each time. The long form is `scripts/torture`."""

import random
import warnings
from pathlib import Path

import pytest

from tests.torture import __main__ as torture
from tests.torture.campaigns import IN_PROCESS, Campaign
from tests.torture.complete_commands import WITH_PROCESSES
from tests.torture.file_campaigns import FILES

READS = 60  # tries of a campaign that only reads files
LONGER = dict.fromkeys(FILES, 24) | {FILES[-1]: 12}  # of those whose tries take longer, the last one most
# Tries of a campaign that starts commands, which take seconds each; the kills are of one that begins, and of a run.
STARTS = {"hostile command lines": (0, 1, 2, 3), "hostile results": (0, 1), "kills": (38, 43)}


@pytest.mark.parametrize("campaign", (*IN_PROCESS, *FILES), ids=lambda c: c.name)
def test_damaged_files_are_refused_or_recovered(campaign: Campaign, tmp_path: Path) -> None:
    """Each try raises where something else comes of it than a message, or what was there before."""
    (tmp_path / "base").mkdir()
    campaign.prepare(tmp_path / "base")
    outcomes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(LONGER.get(campaign, READS)):
            (tmp_path / str(seed)).mkdir()
            outcomes.add(campaign.attempt(random.Random(seed), tmp_path / str(seed)))
    assert len(outcomes) > 1, "some damage shows, and some does not"


def test_a_run_is_repeated_try_by_try(capsys: pytest.CaptureFixture[str]) -> None:
    """By what it prints, whatever time it is given; minutes end one that has a first number alone."""
    assert torture.main(["0.0001", "--campaign", "damaged manifests", "--seed", "7"]) == 0
    *table, again = capsys.readouterr().out.splitlines()
    assert again == "the same run again: --seed 7:1:0" and "| damaged manifests | 100 |" in table[2]
    assert torture.main(["0", "--campaign", "damaged manifests", *again.split()[-2:]]) == 0
    assert capsys.readouterr().out.splitlines() == [*table, again]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, without_gpu: None) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.heavy
@pytest.mark.parametrize("campaign", WITH_PROCESSES, ids=lambda c: c.name)
def test_commands_end_as_they_should(campaign: Campaign, base: Path, tmp_path: Path) -> None:
    """Each try raises where a command shows a traceback, hangs, leaves something behind, or loses what was done."""
    campaign.prepare(base)
    for seed in STARTS.get(campaign.name, (0,)):
        (tmp_path / str(seed)).mkdir()
        assert campaign.attempt(random.Random(seed), tmp_path / str(seed)).value
