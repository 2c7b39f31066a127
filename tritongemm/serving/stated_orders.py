"""Whether rows state one order of additions for each product."""

from collections.abc import Sequence

from tritongemm.core.support import Support
from tritongemm.serving.source_row import SourceRow


def order_of(rows: Sequence[SourceRow]) -> str | Support:
    """Return the order that a product's rows state, "" where none does, or which rows state several."""
    first: dict[str, SourceRow] = {}
    for row in rows:
        if row.record.order:
            first.setdefault(f"{row.record.order}, bits {row.record.row_bits}", row)
    if len(first) > 1:
        listed = "; ".join(f"{what}: {row.where}" for what, row in first.items())
        product = rows[0].record.problem.at(1).product
        return Support(f"{product} has rows of several orders of additions, so none serves: {listed}")
    return next((row.record.order for row in first.values()), "")
