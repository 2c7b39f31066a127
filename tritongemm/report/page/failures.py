"""Figure and table: the outcome of candidates that have no time, and why."""

import re
from collections import Counter
from dataclasses import dataclass

from tritongemm.core.trial import STATUSES
from tritongemm.report.page.figure import Figure, axis, bars, colours, names_axis, plain
from tritongemm.report.page.report_data import ReportData
from tritongemm.system.printable import printable

_TITLE = "What failed and why"
MOST_REASONS = 40  # rows of the table
_REASON_CHARACTERS = 400
_NUMBER = re.compile(r"\d+")
_FAILED = tuple(status for status in STATUSES if status != "ok")


@dataclass(frozen=True)
class FailureReason:
    """Why candidates failed, those with the same words and other numbers together."""

    count: int  # how many did
    # backend, status: of all of them
    backend: str
    status: str
    text: str  # the words of the first
    example: str  # its size and config


def reasons_of(data: ReportData) -> tuple[FailureReason, ...]:
    """Return why candidates failed, the most frequent reason first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], tuple[str, str]] = {}
    for history in data.histories.values():
        for tried in history.tried:
            trial = tried.trial
            if trial.status == "ok":
                continue
            text = printable((trial.reason.splitlines() or [""])[0], _REASON_CHARACTERS)
            kind = (trial.config.backend, trial.status, _NUMBER.sub("0", text))
            counts[kind] += 1
            first.setdefault(kind, (text, f"{tried.problem.key} {trial.config.short_name}"))
    return tuple(FailureReason(count, kind[0], kind[1], *first[kind]) for kind, count in counts.most_common())


def draw(data: ReportData) -> Figure:
    """Draw a bar for each backend: how many of its candidates ended with each status but `ok`."""
    if not data.histories:
        return Figure("failures", _TITLE, "Not drawn: these results have no journal.")
    trials = [tried.trial for history in data.histories.values() for tried in history.tried]
    counts = Counter((trial.config.backend, trial.status) for trial in trials if trial.status != "ok")
    total = f"{len(trials)} candidates were tried"
    if not counts:
        return Figure("failures", _TITLE, f"Not drawn: {total}, and none failed.")
    backends = [name for name, _ in Counter(trial.config.backend for trial in trials).most_common()]
    shades = colours(_FAILED)
    names = [plain(backend) for backend in backends]
    traces = [
        bars(status, {"color": shades[status]}, names, [counts[backend, status] for backend in backends],
             hovertemplate="%{y}: %{x} " + status + "<extra></extra>")
        for status in _FAILED
        if any(counts[backend, status] for backend in backends)
    ]  # fmt: skip
    axes = {"xaxis": axis("candidates without a time"), "yaxis": names_axis()}
    layout = {"barmode": "stack", "showlegend": True, **axes}
    caption = f"{total}; {sum(counts.values())} of them have no time that counts, each for its reason below."
    return Figure("failures", _TITLE, caption, tuple(traces), layout, 180 + 40 * len(backends))
