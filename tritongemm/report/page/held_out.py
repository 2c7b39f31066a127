"""Figure: how much slower rows of tables over M are than the best known, at M that had no part in choosing them."""

import numpy as np

from tritongemm.report.page.figure import SHARES, WORSE, Figure, log_axis, number, plain
from tritongemm.report.page.report_data import ReportData, name_product

_TITLE = "Regret at held-out M"
_LEAST_TOP = 0.05  # of the axis


def draw(data: ReportData) -> Figure:
    """Draw the regret at each M that was held out: a part of the best known time there."""
    seen = [
        (int(m), float(regret), name_product(record))
        for record in data.records
        for m, (regret, _) in record.held_out.items()
    ]
    if not seen:
        return Figure("regret", _TITLE, "Not drawn: no result has M that were held out.")
    regrets = np.array([regret for _, regret, _ in seen])
    caption = (
        f"Time at {len(seen)} M that had no part in choosing the row that serves them, over the best known there, less "
        f"1: {regrets.mean():.1%} on average, {np.percentile(regrets, 90):.1%} at the 90th percentile, "
        f"{regrets.max():.1%} at worst."
    )
    trace = {
        "type": "scatter",
        "mode": "markers",
        "marker": {"color": WORSE, "size": 8, "opacity": 0.7},
        "x": [m for m, _, _ in seen],
        "y": [number(regret) for _, regret, _ in seen],
        "text": [plain(product) for _, _, product in seen],
        "hovertemplate": "M %{x}, %{text}<br>%{y:.2%}<extra></extra>",
    }
    top = max(_LEAST_TOP, 1.05 * regrets.max())
    layout = {
        "xaxis": log_axis("M"),
        "yaxis": {"title": {"text": "regret"}, "tickformat": SHARES, "range": [-0.03 * top, top]},
        "hovermode": "closest",
    }
    return Figure("regret", _TITLE, caption, (trace,), layout)
