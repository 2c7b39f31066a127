"""Holds what commands take from tuned rows: the architecture of all, which calls they serve, and orders that clash."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tritongemm.core.record import Record
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.machine import Machine
from tritongemm.operations.served_problems import describe_calls, is_layer, is_product, is_served
from tritongemm.search_spaces import loader as target_files


def find_machine(name: str | None, targets: Iterable[str]) -> Machine:
    """Return the machine of a command that reads rows: a named architecture, this GPU, or the one of all rows."""
    here, known = machine.find_machine(name), {*targets}
    if name or here.devices or len(known) != 1 or not known <= {*target_files.target_names()}:
        return here
    return machine.find_machine(known.pop())


def list_calls(records: Sequence[Record], every: bool = True) -> Iterator[str]:
    """Yield a line for each kind of calls that records serve."""
    measured = "are predictions, which serve no call; measured on a GPU they"
    kinds = Counter(
        (describe_calls(r.problem), (measured if is_served(r.problem) else "are predictions, and") * r.predicted)
        for r in records
        if every or _is_other(r)
    )
    for (calls, unless), count in kinds.items():
        which = "these results" if count == len(records) else f"{count} of {len(records)} results"
        yield " ".join(filter(None, (which, unless, "serve", calls)))


def list_conflicts(records: Iterable[Record]) -> Iterator[str]:
    """Yield a line for each product on a device whose records state several orders of additions."""
    orders: dict[tuple[str, str, int], dict[str, Record]] = {}
    for record in records:
        which = record.problem.at(1).product, record.target, record.compute_units
        if record.order:
            orders.setdefault(which, {}).setdefault(f"{record.order}, bits {record.row_bits}", record)
    for (product, *_), found in orders.items():
        if len(found) > 1:
            listed = "; ".join(f"{what} at M {record.problem.m}" for what, record in found.items())
            yield f"{product} has results of several orders of additions, so none serves invariant rows: {listed}"


def _is_other(record: Record) -> bool:
    """Return whether a record has another memory layout than a linear layer's, or serves no call."""
    problem = record.problem
    return not is_served(problem) or (is_product(problem) and not is_layer(problem))
