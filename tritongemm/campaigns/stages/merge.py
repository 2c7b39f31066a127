"""Stage: results of the campaign, and of configs that were tuned alone → one results file."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tritongemm.campaigns import tables
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.merging import RACES, merge_campaign, read_results
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.record import Record
from tritongemm.core.trial import PREDICTED
from tritongemm.formats import read_text, results_format
from tritongemm.system import files
from tritongemm.workloads import sizes

_ADVICE = "make room and run the same command again"


def run(campaign: Campaign) -> None:
    """Write one results file with the best result of each GEMM for the campaign's target.

    Of two results of one GEMM on one kind of device a measured one goes before a predicted one, and the faster before
    the slower; which lost is said. Results of other campaigns that disagree with these are raced again.
    """
    others = _take_in(campaign)  # first, as a file that can't be read leaves all as it was
    order = {gemm.problem: place for place, gemm in enumerate(tables.read_gemms(campaign.folder))}
    best: dict[tuple[str, int], Record] = {}
    for path, record in _records(campaign):
        if record.target != campaign.target.name or record.problem.key not in order:
            campaign.say(f"left out: {path}: {record.problem.key} on {record.target} is not of this campaign")
            continue
        key = record.problem.key, record.compute_units
        known = best.setdefault(key, record)
        if known is not record:
            best[key] = min(known, record, key=_rank)
            lost = max(known, record, key=_rank)
            campaign.say(
                f"{path}: {record.problem.key} has two results: {best[key].seconds * 1e6:.4g} us is kept, "
                f"{lost.seconds * 1e6:.4g} us is not"
            )
    if not best:
        raise InputError(f"{campaign.folder} has no results; run --only tune first")
    kept = sorted(best.values(), key=lambda record: (order[record.problem.key], record.compute_units))
    files.atomic_write(campaign.merged, results_format().write(kept), _ADVICE)
    campaign.say(f"merged: {len(kept)} results in {campaign.merged}")
    missing = order.keys() - {record.problem.key for record in kept}
    for problem in sorted(missing, key=order.__getitem__):
        campaign.say(f"no result: {problem}")
    for other in others:
        merge_campaign(campaign.folder, other, campaign.open_tools if campaign.devices else None, campaign.say)
    (campaign.folder / RACES).unlink(missing_ok=True)  # done: running the stage again measures again


def why_again(campaign: Campaign) -> str:
    """Return why the stage runs again; "" where it does not: results of other campaigns are merged in once."""
    if not campaign.merged.exists():
        return f"{campaign.merged} is not there: done again"
    new = [str(other) for other in campaign.others if not _copy_of(campaign, other, _read_checked(other)).exists()]
    return f"{' and '.join(new)} is to be merged in: done again" if new else ""


def _take_in(campaign: Campaign) -> list[Path]:
    """Copy the results of other campaigns, and return all copies, also earlier ones, so that none is lost."""
    for other in campaign.others:
        text = _read_checked(other)
        files.atomic_write(_copy_of(campaign, other, text), text, _ADVICE)
    return sorted(campaign.taken_in.glob("*.yaml"))


def _read_checked(other: Path) -> str:
    """Return the text of another campaign's results, which can be merged."""
    text = read_text(other)
    read_results(other, text)
    return text


def _copy_of(campaign: Campaign, other: Path, text: str) -> Path:
    """Return the path of a copy of results: equal files of one name share one."""
    return campaign.taken_in / f"{other.stem[:80]}.{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"


def _rank(record: Record) -> tuple[bool, float]:
    return record.timer == PREDICTED, record.seconds


def _records(campaign: Campaign) -> Iterator[tuple[Path, Record]]:
    """Yield the results of the stage before, and those of the configs' own scripts."""
    alone = [campaign.alone / f"{gemm.config}.yaml" for gemm in tables.read_gemms(campaign.folder)]
    for path in (campaign.tuned, *alone):
        if path.exists():
            for row in sizes.from_file(path, Defaults(fp8_encoding=campaign.target.fp8)):
                if row.record is not None:
                    yield path, row.record
