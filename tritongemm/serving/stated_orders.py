"""Whether rows state the orders in which their kernels add up, one for each product."""

from collections.abc import Sequence

from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, LibraryBackend
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


def check(record: Record, target: Target) -> Support:
    """Return whether a row's kernel adds up in the order that it states; of a library's algorithm only bits show it."""
    backend = registry.get(Backend, record.config.backend)
    order = backend.reduction_order(record.config, record.problem, target)
    if isinstance(order, Support):
        return order
    if isinstance(backend, LibraryBackend) or str(order) == record.order:
        return SUPPORTED
    return Support(f"it states the order {record.order}, and its kernel adds up in the order {order}")
