"""Prints tables of stored results that were run again."""

from collections.abc import Sequence

from tritongemm.core.trial import PREDICTED
from tritongemm.report.console import Reporter
from tritongemm.results.revalidation import LEAST_KEPT_SHARE_OF_GAIN, RetimedResult, VerifiedResult


def print_verified(reporter: Reporter, results: Sequence[VerifiedResult], verification: str) -> None:
    """Print the error of each result, how many are correct, and what that means."""
    rows = []
    for result in results:
        trial = result.trial
        error, limit = ("-" if v is None else f"{v:.2e}" for v in (trial.error, trial.tolerance))
        rows.append(
            [result.problem.key, trial.status, error, limit, result.how or "-", trial.config.short_name, trial.reason]
        )
    reporter.table("", ["size", "status", "error", "allowed", "checked", "config", "why"], rows)
    wrong, refused = sum(r.wrong for r in results), sum(r.refused for r in results)
    unchecked = sum(r.unchecked for r in results)
    counts = (wrong, "are not"), (refused, "are refused"), (unchecked, "can't be checked here")
    others = [f", {n} {what}" for n, what in counts if n]
    reporter.say(f"{len(results) - wrong - refused - unchecked} of {len(results)} results are right{''.join(others)}")
    if any(result.how for result in results):
        reporter.say(f"checked {verification}")


def print_retimed(reporter: Reporter, results: Sequence[RetimedResult]) -> None:
    """Print the times of each result beside those stored, and how many of the recorded gains hold."""
    columns = ["size", "us", "stored us", "TFLOPS", "library us", "ratio", "stored ratio", "timer", "config", "why"]
    predicted = any(r.trial.timer == PREDICTED for r in results)
    title = f"Predicted, not measured (timer: {PREDICTED})" if predicted else ""
    reporter.table(title, columns, [_retimed_row(r) for r in results])
    found = [r.gain_holds for r in results if r.gain_holds is not None]
    if found:
        within, share = 1 - LEAST_KEPT_SHARE_OF_GAIN, sum(found) / len(found)
        reporter.say(f"{sum(found)} of {len(found)} recorded gains hold within {within:.0%} ({share:.0%})")
    reporter.wrong_libraries([f"{r.problem.key} ({r.library_wrong})" if r.library_wrong else "" for r in results])


def _retimed_row(result: RetimedResult) -> list[str]:
    trial, record = result.trial, result.record
    timed = trial.status == "ok"
    return [
        result.problem.key,
        _microseconds(trial.seconds) if timed else "-",
        _microseconds(record.seconds) if record else "-",
        f"{result.problem.flops / trial.seconds / 1e12:.1f}" if timed else "-",
        _microseconds(result.baseline_seconds) if timed and result.baseline_seconds else "-",
        _ratio(result.ratio),
        _ratio(record.speedup if record else None),
        trial.timer if timed else "not timed" if trial.status == "pruned" else trial.status,
        trial.config.short_name,
        trial.reason,
    ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _ratio(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"
