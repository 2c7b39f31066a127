"""Runs the stages of a campaign in their order: each once, as the folder's file says, and a killed one resumes."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tritongemm.campaigns import stages
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.merging import read_results
from tritongemm.core.errors import InputError, NewerFileError, OutputError, UnavailableError
from tritongemm.core.values import FINITE, TEXT, FieldKind, Text, kinds_of, list_of, require
from tritongemm.formats import read_text
from tritongemm.system import files
from tritongemm.system.locks import locked
from tritongemm.system.reading import read_bytes

NAME = "campaign.json"
_SCHEMA = 1
_ADVICE = "choose another folder with -o"


@dataclass(frozen=True)
class CampaignState:
    """What a folder is the campaign of."""

    log: Text  # name of the log
    digest: Text  # SHA-256 of its contents
    target: Text  # name of the target
    threshold: Annotated[float, FINITE]  # of the configs, in percent
    done: Annotated[tuple[str, ...], list_of(TEXT)] = ()  # stages that are done, in their order

    @classmethod
    def read(cls, folder: Path) -> CampaignState | None:
        """Return a folder's state; None where it has no campaign."""
        path = folder / NAME
        if not path.exists():
            return None
        try:
            values = json.loads(read_bytes(path))
            if isinstance(values, dict) and isinstance(schema := values.get("schema"), int) and schema > _SCHEMA:
                raise NewerFileError(path, schema, _SCHEMA)
            if not isinstance(values, dict) or values.keys() != _KINDS.keys():
                raise InputError(f"it must be a map of {', '.join(_KINDS)}")
            require(values, _KINDS)
        except NewerFileError:
            raise
        except (ValueError, RecursionError, InputError) as error:
            raise InputError(
                f"{path} is damaged ({error}): delete it, and the same command goes through all stages again; what was "
                "measured is kept"
            ) from None
        del values["schema"]
        return cls(**values | {"done": tuple(values["done"])})

    def write(self, folder: Path) -> None:
        """Replace a folder's file."""
        text = json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1)
        files.atomic_write(folder / NAME, text + "\n", _ADVICE)

    def without(self, stages: Sequence[str]) -> CampaignState:
        """Return the state with some stages not done."""
        return replace(self, done=tuple(stage for stage in self.done if stage not in stages))


_KINDS = {"schema": FieldKind(str(_SCHEMA), lambda value: value == _SCHEMA), **kinds_of(CampaignState)}


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created where it is missing, against other campaigns."""
    path = folder / ".campaign.lock"
    files.check_place(path, lambda start: not start, "a lock of tritongemm", _ADVICE)
    with locked(path, f"another campaign runs in {folder}; wait for it, or {_ADVICE}", _ADVICE):
        files.sweep(folder)
        yield


STAGES = ("configs", "tune", "merge", "benchmark", "filter")
_MEASURES = "benchmark"  # the first stage that can do nothing without a GPU


def run_campaign(campaign: Campaign, only: str = "") -> None:
    """Run the stages that are not done, or one of them whether it is done or not.

    Without a GPU those that only measure are left for a machine that has one, which is said.
    """
    asked = _requested(campaign)
    for other in campaign.others:  # hours before the stage that merges it in
        read_results(other, read_text(other))
    with holding(campaign.folder):
        now = _begin(campaign, asked)
        for stage in (only,) if only else STAGES:
            _require_before(stage, now, campaign)
            module = _stage(stage, campaign)
            if stage in now.done and not only:
                again = module.why_again(campaign)
                campaign.say(f"{stage}: {again or f'done already (--only {stage} does it again)'}")
                if not again:
                    continue
            if stage == _MEASURES and not campaign.devices and not only:
                campaign.say(_describe_rest(campaign))
                return
            now = now.without(STAGES[STAGES.index(stage) :])
            now.write(campaign.folder)
            module.run(campaign)
            now = replace(now, done=(*now.done, stage))
            now.write(campaign.folder)


def _describe_rest(campaign: Campaign) -> str:
    """Return a line with the stages that are left, and the command with which a machine with a GPU runs them."""
    rest = " and ".join(STAGES[STAGES.index(_MEASURES) :])
    return (
        f"{rest}: left to do, as they measure and no GPU driver with a device was found here; copy {campaign.folder} "
        "and the LOG to a machine that has the GPU, and run the same command there, or name a Ray cluster whose hosts "
        "have it with --ray"
    )


def _requested(campaign: Campaign) -> CampaignState:
    """Return what the command asks for, before anything is written."""
    if campaign.log is not None:
        digest = campaign.log_file.digest
        return CampaignState(str(campaign.log), digest, campaign.target.name, campaign.threshold)
    found = CampaignState.read(campaign.folder)
    if found is None:
        raise InputError(f"there is no campaign in {campaign.folder} to go on with: name the LOG of a job's BLAS calls")
    if found.threshold != campaign.threshold:
        raise InputError(
            f"{campaign.folder} has the configs of --thr {found.threshold:g}: name the LOG for those of another"
        )
    return replace(found, target=campaign.target.name)


def _begin(campaign: Campaign, asked: CampaignState) -> CampaignState:
    """Return what is known of the folder, or what is requested for where the folder has no campaign yet."""
    found = CampaignState.read(campaign.folder)
    if found is None:
        return asked
    for what, theirs, ours in (("log", found.digest, asked.digest), ("target", found.target, asked.target)):
        if theirs == ours:
            continue
        if what == "log" and found.log == asked.log:
            raise OutputError(
                f"{campaign.folder} has the campaign of what {found.log} held before it was changed: choose another "
                "folder with -o, or leave the LOG out to go on with what was read then"
            )
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


def _stage(stage: str, campaign: Campaign) -> Any:
    """Return the module of a stage: `run` runs it, `why_again` returns why a stage that is done runs again, or ""."""
    if stage not in {module.name for module in pkgutil.iter_modules(stages.__path__)}:
        raise UnavailableError(
            f"the stage {stage} is not part of this installation; what is done so far is in {campaign.folder}"
        )
    return importlib.import_module(f"{stages.__name__}.{stage}")
