"""Stage: a log → what takes most of its time: `summary.csv`, `gemms.csv`, a config a GEMM and a script to run it."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from tritongemm.campaigns import tables
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.column_major import config_letters
from tritongemm.campaigns.tables import read_rows
from tritongemm.campaigns.weights import BASELINE, MEASURED, PREDICTED, BaselineTimes, weigh
from tritongemm.campaigns.workload import LoggedProduct, read_workload
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow
from tritongemm.formats import results_format
from tritongemm.system import files

_ADVICE = "make room and run the same command again, or choose another -o"
_ELSEWHERE = "choose another folder with -o"
_LARGE_BYTES = 64 << 20  # a log of this size takes many seconds to read, which is reported
_MOST_PRINTED = 20  # products that can't be computed here and have a line each
_SCRIPT = """#!/bin/sh
# {about}
# Tunes this GEMM alone; --only merge takes the result in. Options are those of tritongemm tune.
cd "$(dirname "$0")" && exec "${{PYTHON:-python3}}" -m tritongemm.tune \\
  --gemm_size_file {name}.yaml -o alone/{name}.yaml {options} "$@"
"""


def run(campaign: Campaign) -> None:
    """Write tables, configs and scripts for a log."""
    if campaign.log_file.size > _LARGE_BYTES:
        campaign.say(f"{campaign.log}: reading {campaign.log_file.size >> 20} MiB")
    workload = read_workload(campaign.log_file, campaign.target)
    for remark in workload.remarks:
        campaign.say(remark)
    products = weigh(campaign, workload.products)
    configs = _name_configs(products, campaign.threshold)
    _print_shares(campaign, products, configs)
    chosen = {name: products[place] for place, name in configs.items()}
    _check_places(campaign.folder, chosen)
    _write(campaign.folder / tables.SUMMARY, tables.write_summary(products, configs, campaign.threshold))
    if not configs:
        raise InputError(_why_none(campaign, products))
    _sweep(campaign.folder)
    for name, one in chosen.items():
        _write_config(campaign, name, one)
    _write(campaign.folder / tables.GEMMS, tables.write_gemms(chosen))
    campaign.say(f"configs: {len(chosen)} in {campaign.folder}, {tables.GEMMS} lists them")


def why_again(campaign: Campaign) -> str:
    """Return why the stage runs again; "" where it does not: measured shares are possible, or tables are incomplete."""
    try:
        tables.read_gemms(campaign.folder)
        count = _count_unmeasured(campaign)
    except InputError as error:
        if campaign.log is None:
            raise InputError(f"{error}; name the LOG to have it written again") from None
        return f"{error}: done again"
    if not count:
        return ""
    what = f"{tables.SUMMARY} has predicted times of {count} GEMMs, and a GPU is here"
    if campaign.log is None:
        campaign.say(f"{what}: name the LOG to have them measured")
        return ""
    return f"{what}: done again"


def _count_unmeasured(campaign: Campaign) -> int:
    """Return how many GEMMs have a predicted time, though a GPU that is here may measure them."""
    rows = [row for _, row in read_rows(campaign.folder / tables.SUMMARY, ("problem", "baseline"))]
    predicted = [row["problem"] for row in rows if row["problem"] and row["baseline"] == PREDICTED]
    if not campaign.devices or not predicted or not (campaign.folder / BASELINE).exists():
        return len(predicted) if campaign.devices else 0
    with closing(BaselineTimes(campaign.folder / BASELINE, campaign.measured_with)) as known:
        return sum(key not in known for key in predicted)


def _name_configs(products: Sequence[LoggedProduct], threshold: float) -> dict[int, str]:
    """Return a name for each product that is tuned, by its place."""
    numbers: Counter[str] = Counter()
    names = {}
    for place, one in enumerate(products):
        if one.problem is not None and one.share >= threshold:
            letters = config_letters(one.call)
            names[place] = f"{letters}_{numbers[letters]}"
            numbers[letters] += 1
    return names


def _print_shares(campaign: Campaign, products: Sequence[LoggedProduct], configs: dict[int, str]) -> None:
    """Print what is tuned, what the threshold cut off, and what can't be computed, each with its share of the time."""
    total = sum(one.total_seconds for one in products)
    computed = [one for one in products if one.problem is not None]
    measured = sum(one.how == MEASURED for one in computed)
    some = f"{measured} of them measured" if measured else "predicted" if computed else "as the data sheet says"
    how = "measured" if computed and measured == len(computed) else some
    campaign.say(
        f"{campaign.log}: {len(products)} GEMMs in {sum(one.count for one in products):.15g} calls take "
        f"{total * 1e3:.4g} ms, {how}"
    )
    cut = [one for place, one in enumerate(products) if place not in configs and one.problem is not None]
    share, lost = (sum(products[place].share for place in configs), sum(one.share for one in cut))
    campaign.say(f"to tune: {len(configs)} GEMMs, {share:.2f} % of the time")
    campaign.say(f"below {campaign.threshold:g} %: {len(cut)} GEMMs, {lost:.2f} % of the time together")
    _print_uncomputed(campaign, [one for one in products if one.problem is None])


def _print_uncomputed(campaign: Campaign, others: Sequence[LoggedProduct]) -> None:
    """Print what can't be computed here and why, a line for each of the largest; `SUMMARY` lists all."""
    for one in others[:_MOST_PRINTED]:
        where = f"{campaign.log}: line {one.line}: {one.call.words}"
        campaign.say(f"not computed here: {where}: about {one.share:.2f} % of the time: {one.reason}")
    share = sum(one.share for one in others)
    if len(others) > _MOST_PRINTED:
        campaign.say(f"not computed here: {len(others) - _MOST_PRINTED} others; {tables.SUMMARY} has their reasons")
    if others:
        campaign.say(f"not computed here: {len(others)} GEMMs, about {share:.2f} % of the time together")


def _why_none(campaign: Campaign, products: Sequence[LoggedProduct]) -> str:
    """Return why no GEMM of the log is tuned, for an error."""
    computed = [one for one in products if one.problem is not None]
    if not computed:
        first = products[0]
        return (
            f"{campaign.log}: none of its {len(products)} GEMMs can be computed for {campaign.target.name}; the first "
            f"(line {first.line}): {first.reason}; {campaign.folder / tables.SUMMARY} has all"
        )
    return (
        f"{campaign.log}: no GEMM takes {campaign.threshold:g} % of the time; the largest (line "
        f"{computed[0].line}) takes {computed[0].share:.4g} %: lower --thr; "
        f"{campaign.folder / tables.SUMMARY} has all"
    )


def _write_config(campaign: Campaign, name: str, one: LoggedProduct) -> None:
    """Write a GEMM as a file of sizes, and the script that tunes it alone."""
    problem, count = one.problem, one.count
    assert problem is not None, "what is tuned can be computed"
    about = f"{name}: {problem.key}, {one.share:.2f} % of the time of the log"
    row = FormatRow(problem, count=int(count) if count.is_integer() else count)
    _write(campaign.folder / f"{name}.yaml", f"# {about}\n{results_format().write_sizes([row])}")
    script = campaign.folder / f"{name}.sh"
    _write(script, _SCRIPT.format(about=about, name=name, options=shlex.join(campaign.tune_options)))
    mode = script.stat().st_mode
    script.chmod(mode | (mode & 0o444) >> 2)  # users who may read it, by the umask, may run it


def _check_places(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that holds tables and configs of other programs, as hipBLASLt's TuningDriver uses these names."""
    for table in (tables.SUMMARY, tables.GEMMS):
        files.check_place(folder / table, tables.is_table, "a table of a campaign", _ELSEWHERE)
    for name in names:

        def is_ours(start: bytes, remark: bytes = f"# {name}: ".encode()) -> bool:
            return not start or remark in start

        for suffix in (".yaml", ".sh"):
            files.check_place(folder / f"{name}{suffix}", is_ours, "a config that tritongemm wrote", _ELSEWHERE)


def _sweep(folder: Path) -> None:
    """Delete the configs that an earlier run of this stage wrote, as its table lists them."""
    with suppress(InputError):
        for gemm in tables.read_gemms(folder):
            for suffix in (".yaml", ".sh"):
                (folder / f"{gemm.config}{suffix}").unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    files.atomic_write(path, text, _ADVICE)
