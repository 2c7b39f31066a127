"""Rows of times → geometric means, the table, the plot. A row is one size, JSON values only:

{"m", "n", "k", "key", "roofline_us", "times": {competitor: {"us", …} or {"reason"}}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from competitors import BASELINE

Row = dict[str, Any]
SAME = 1.005  # a lead below this is none


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    found = list(values)
    return geometric_mean(found) if found else None


def us(row: Row, name: str) -> float | None:
    """Microseconds of a competitor, where it ran."""
    return row["times"].get(name, {}).get("us")


def ratio(row: Row, name: str, over: str = BASELINE) -> float | None:
    """How many times as fast as another one a competitor is."""
    mine, theirs = us(row, name), us(row, over)
    return theirs / mine if mine and theirs else None


def roofline(row: Row, name: str) -> float | None:
    """Share of the roofline."""
    mine = us(row, name)
    return row["roofline_us"] / mine if mine else None


def summary(rows: Sequence[Row], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures of each competitor over the sizes it ran: means, worst ratio, shares of sizes, seconds of tuning."""
    found: dict[str, dict[str, Any]] = {}
    groups = sorted({r["m"] for r in rows})
    for name in names:
        ran = [r for r in rows if ratio(r, name)]
        slowest = min(ran, key=lambda r: ratio(r, name) or 0, default=None)
        best = [min(t for n in names if (t := us(r, n))) for r in ran]
        seconds = [t["tuning_s"] for r in rows if (t := r["times"].get(name, {})).get("tuning_s") is not None]
        found[name] = {
            "sizes": len(ran),
            "geomean": geomean(ratio(r, name) for r in ran),
            "by_m": {str(m): geomean(ratio(r, name) for r in ran if r["m"] == m) for m in groups},
            "worst": ratio(slowest, name) if slowest else None,
            "worst_at": slowest["key"] if slowest else "",
            "roofline": geomean(roofline(r, name) for r in ran),
            "beats_torch": sum(ratio(r, name) >= SAME for r in ran) / len(ran) if ran else None,
            "fastest": sum(us(r, name) <= b for r, b in zip(ran, best, strict=True)) / len(ran) if ran else None,
            "tuning_s": sum(seconds) if seconds else None,
        }
        both = [r for r in ran if ratio(r, "ours", name)]
        found[name]["ours_over_it"] = geomean(ratio(r, "ours", name) for r in both)
    return found


WIDTH = 19  # of a competitor's column


def heading(names: Sequence[str]) -> str:
    """Heads of the columns of `line`."""
    return f"{'M x N x K':<18}" + "".join(f"{n:>{WIDTH}}" for n in names)


def line(row: Row, names: Sequence[str]) -> str:
    """A line of text for a size: microseconds, ratio to torch and share of the roofline of each competitor."""
    cells = []
    for name in names:
        mine, gain, share = us(row, name), ratio(row, name), roofline(row, name)
        lead = f"{gain:.3f}" if gain else "-"
        cells.append(f"{mine:.2f} {lead} {share:.2f}".rjust(WIDTH) if mine and share else f"{'-':>{WIDTH}}")
    return f"{row['m']}x{row['n']}x{row['k']}".ljust(18) + "".join(cells)


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """The summary, a column for each competitor."""
    found = summary(rows, names)

    def over(title: str, value: Callable[[dict[str, Any]], str]) -> str:
        return f"{title:<26}" + "".join(f"{value(found[n]):>13}" for n in names)

    def number(key: str, form: str = ".3f") -> Callable[[dict[str, Any]], str]:
        return lambda s: _shown(s[key], form)

    lines = [f"{'':<26}" + "".join(f"{n:>13}" for n in names)]
    lines.append(over("sizes", number("sizes", "d")))
    for m in sorted({r["m"] for r in rows}):
        lines.append(over(f"ratio, M = {m}", lambda s, key=str(m): _shown(s["by_m"][key], ".3f")))
    lines.append(over("ratio to torch, geomean", number("geomean")))
    lines.append(over("worst ratio", number("worst")))
    lines.append(over("ours over it, geomean", number("ours_over_it")))
    lines.append(over("share of roofline, geomean", number("roofline")))
    lines.append(over("beats torch, of sizes", number("beats_torch", ".0%")))
    lines.append(over("fastest, of sizes", number("fastest", ".0%")))
    lines.append(over("seconds of tuning", number("tuning_s", ".1f")))
    slow = {n: found[n] for n in names if found[n]["worst"] and n != BASELINE}
    worst = [f"{n} {s['worst']:.3f} at {s['worst_at']}" for n, s in slow.items()]
    return "\n".join([*lines, *(["worst: " + "; ".join(worst)] if worst else []), *remarks(rows, names)])


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def remarks(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What a reader must know beside the figures."""
    said = []
    for name in names:
        entries = [(r["key"], r["times"].get(name, {})) for r in rows]
        refused: dict[str, list[str]] = {}
        for key, entry in entries:
            if "us" not in entry:
                refused.setdefault(entry.get("reason", "not run"), []).append(key)
            elif str(entry.get("how", "")).startswith("events"):
                refused.setdefault(entry["how"], []).append(key)
        for why, keys in refused.items():
            said.append(f"{name}, {len(keys)} sizes ({keys[0]} …): {why}")
        timed = [e for _, e in entries if e.get("detail", {}).get("tried")]
        if timed:
            tried, kept = (sum(e["detail"][k] for e in timed) for k in ("tried", "kept"))
            seconds = sum(e["tuning_s"] for e in timed)
            entire = seconds * kept / tried
            said.append(
                f"{name}: tried {tried} of {kept} kept configs of its template in {seconds:.0f} s; all of them would "
                f"take about {entire / 60:.0f} minutes at that rate"
            )
    return said


def plot(path: Path, rows: Sequence[Row], names: Sequence[str], title: str) -> None:
    """Ratio to torch and share of the roofline, size by size."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(max(8, len(rows) * 0.28), 8), sharex=True)
    for name in names:
        upper.plot([ratio(r, name) for r in rows], marker=".", label=name)
        lower.plot([roofline(r, name) for r in rows], marker=".", label=name)
    upper.set(title=title, ylabel="times as fast as torch")
    lower.set(ylabel="share of the roofline", ylim=(0, 1))
    lower.set_xticks(range(len(rows)), [f"{r['m']}x{r['n']}x{r['k']}" for r in rows], rotation=90, fontsize=7)
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
    upper.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
