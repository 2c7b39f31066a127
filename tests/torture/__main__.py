"""The long form: `python -m tests.torture [MINUTES]` tries every campaign in turn and prints the counts.

The exit status is 1 if a try failed. A failure is printed with the campaign's name and the number that makes it again:
`python -m tests.torture --campaign NAME --try NUMBER`. The last line says how to repeat the run, with as many tries in
the same order: `--seed FIRST:ROUNDS:STARTS`, with the same `--campaign`.
"""

import argparse
import faulthandler
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.torture.campaigns import IN_PROCESS, Campaign
from tests.torture.complete_commands import WITH_PROCESSES
from tests.torture.file_campaigns import FILES
from tests.torture.outcome import Outcome, Tally, TortureFailure

_BATCH = 100  # tries that one process makes of a campaign that reads files, so that a crash costs few
_TRY_SECONDS = 60  # a try that only reads files and takes longer has hung
_SHARE = 0.15  # of the time that goes to campaigns that only read files, which try thousands of times


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="scripts/torture", description="Try to break the commands, and count what came of it."
    )
    p.add_argument("minutes", type=float, nargs="?", default=10.0, help="how long to try (default %(default)s)")
    p.add_argument("--campaign", help="only those whose names hold this text")
    p.add_argument("--try", type=int, dest="one", metavar="NUMBER", help="one try of each, with this number")
    p.add_argument("--seed", type=_run_number, default=(random.SystemRandom().randrange(10**9), None, None),
                   metavar="FIRST[:ROUNDS:STARTS]",
                   help="the run that begins with this number, and ends after as many tries")  # fmt: skip
    args = p.parse_args(argv)
    readers = (*IN_PROCESS, *FILES)
    chosen = [c for c in (*readers, *WITH_PROCESSES) if (args.campaign or "") in c.name]
    tallies = {c.name: Tally() for c in chosen}
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        bases = {c.name: Path(folder, str(number)) for number, c in enumerate(chosen)}
        for campaign in chosen:
            bases[campaign.name].mkdir()
            campaign.prepare(bases[campaign.name])
        if args.one is not None:
            for campaign in chosen:
                print(campaign.name, _tried(campaign, args.one, Path(folder)))
            return 0
        quick = [c for c in chosen if c in readers]
        slow = [c for c in chosen if c in WITH_PROCESSES]
        share = _SHARE if quick and slow else 1.0 if quick else 0.0
        (first, rounds, starts), seconds = args.seed, 60 * args.minutes
        rounds = _read_files(quick, tallies, first, _going_on(rounds, seconds * share), Path(folder))
        starts = _run_commands(slow, tallies, first, _going_on(starts, seconds * (1 - share)), Path(folder))
    _print(tallies)
    print(f"the same run again: --seed {first}:{rounds}:{starts}")
    return int(any(tally.failures for tally in tallies.values()))


def _run_number(text: str) -> tuple[int, int | None, int | None]:
    """The first number of a run, its rounds of files and its starts of commands; None where time ends it."""
    found = re.fullmatch(r"(\d+)(?::(\d+):(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and no FIRST:ROUNDS:STARTS")
    first, rounds, starts = (None if digits is None else int(digits) for digits in found.groups())
    return first or 0, rounds, starts


def _going_on(most: int | None, seconds: float) -> Callable[[int], bool]:
    """Whether a run goes on after some tries: up to a number of them, or until a time is over."""
    until = time.monotonic() + seconds
    return (lambda _: time.monotonic() < until) if most is None else (lambda done: done < most)


def _tried(campaign: Campaign, seed: int, folder: Path) -> Outcome:
    place = Path(tempfile.mkdtemp(prefix="try-", dir=folder))
    try:
        return campaign.attempt(random.Random(seed), place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _outcome(campaign: Campaign, seed: int, folder: Path) -> Outcome | str:
    try:
        return _tried(campaign, seed, folder)
    except TortureFailure as failure:
        return f"{campaign.name}, --try {seed}: {failure}"
    except Exception:
        return f"{campaign.name}, --try {seed}: {traceback.format_exc()[-1500:]}"


def _count(tally: Tally, reported: Outcome | str) -> None:
    if isinstance(reported, Outcome):
        tally.outcomes[reported] += 1
    else:
        tally.failures.append(reported)
        print(f"FAILED {reported}", file=sys.stderr, flush=True)


def _read_files(
    campaigns: Sequence[Campaign], tallies: dict[str, Tally], first: int, goes_on: Callable[[int], bool], folder: Path
) -> int:
    """Try the campaigns that only read files, in processes that may crash; the number of rounds."""
    context, rounds = get_context("fork"), 0
    while campaigns and goes_on(rounds):
        seed = first + _BATCH * rounds
        for campaign in campaigns:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_try_batch, args=(campaign, range(seed, seed + _BATCH), folder, theirs))
            process.start()
            theirs.close()
            done = 0
            try:
                while True:
                    _count(tallies[campaign.name], ours.recv())
                    done += 1
            except EOFError:
                process.join()
            if done < _BATCH:
                reported = f"{campaign.name}, --try {seed + done}: the process ended with {process.exitcode}"
                _count(tallies[campaign.name], reported)
        rounds += 1
    return rounds


def _try_batch(campaign: Campaign, seeds: range, folder: Path, outcomes: Connection) -> None:
    faulthandler.disable()
    warnings.simplefilter("ignore")
    for seed in seeds:
        signal.alarm(_TRY_SECONDS)
        outcomes.send(_outcome(campaign, seed, folder))
    signal.alarm(0)


def _run_commands(
    campaigns: Sequence[Campaign], tallies: dict[str, Tally], first: int, goes_on: Callable[[int], bool], folder: Path
) -> int:
    """Try the campaigns that start commands, as many at a time as there are cores; the number of tries."""
    cores, numbers = len(os.sched_getaffinity(0)), count()

    def work(_: int) -> int:
        tries = 0
        while campaigns and goes_on(number := next(numbers)):
            campaign = campaigns[number % len(campaigns)]
            _count(tallies[campaign.name], _outcome(campaign, first + number, folder))
            tries += 1
        return tries

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(work, range(cores)))


def _print(tallies: dict[str, Tally]) -> None:
    columns = ("tried", *(outcome.value for outcome in Outcome), "failed")
    print("| campaign | " + " | ".join(columns) + " |\n| --- |" + " --- |" * len(columns))
    total = [0] * len(columns)
    for name, tally in tallies.items():
        counts = [tally.tried, *(tally.outcomes[outcome] for outcome in Outcome), len(tally.failures)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    print("| all | " + " | ".join(map(str, total)) + " |")


if __name__ == "__main__":
    sys.exit(main())
