"""Finds linear layers of a model that read one input, and the one product that computes all of them.

Servers pack the weights of such layers when they load a model. Tuning lists the joined products beside the layers' own,
and `tritongemm.patch` computes them where the tuned tables say that this is faster.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.workloads.m_spans import MSpan, group_spans

# Names that models give to layers of one module which read the same tensor, in the order in which they are called.
SIBLINGS: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
# A table of a joined product is worth its tuning where a layer alone does not keep a GPU busy, and the result is small.
_MOST_PART_BYTES: Final = 64_000_000  # of the least layer's product, with an M of 1
_MOST_RESULT_BYTES: Final = 8 * 2**20
_LEAST_GAIN: Final = 1.02
# Operations element by element read some columns of a result of many rows more slowly than dense rows, by as much as
# was seen on an H200 with SiLU, its product and rotary embeddings of PyTorch at 16 to 2048 rows.
_COLUMNS_SECONDS: Final = 1e-6
_COLUMNS_SECONDS_A_BYTE: Final = 0.8e-12


@dataclass(frozen=True)
class JoinedRow:
    """The product that computes sibling layers at one M."""

    row: FormatRow  # the product, how often it would be called, and the layers
    parts: tuple[Problem, ...]  # the layers' own products


def find_siblings(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the groups of layers that read one input, by the layers' paths in a model."""
    known = dict.fromkeys(names)
    parents = dict.fromkeys(name[: name.rfind(".") + 1] for name in known)
    groups = [tuple(parent + name for name in siblings) for parent in parents for siblings in SIBLINGS]
    return [group for group in groups if all(name in known for name in group)]


def join_rows(rows: Iterable[FormatRow]) -> list[JoinedRow]:
    """Return the joined products of a workload's sibling layers, which differ in N alone.

    A row that several layers called counts in equal shares for each; a layer of several sizes is left out.
    """
    callers: dict[Problem, dict[str, list[FormatRow]]] = {}
    for row in rows:
        if _is_layer(row.problem):
            of_kind = callers.setdefault(replace(row.problem, n=1), {})
            for caller in row.callers:
                of_kind.setdefault(caller, []).append(row)
    joined = []
    for kind, of_kind in callers.items():
        for group in find_siblings(of_kind):
            found = [row for name in group for row in of_kind[name]]
            if len(found) == len(group):
                product = replace(kind, n=sum(row.problem.n for row in found))
                count = min(row.count / len(row.callers) for row in found)
                row = FormatRow(product, count=count, operation=found[0].operation, callers=group)
                joined.append(JoinedRow(row, tuple(row.problem for row in found)))
    return joined


def joined_spans(rows: Sequence[FormatRow], m_range: tuple[int, int] | None = None) -> dict[MSpan, tuple[str, ...]]:
    """Return the spans of M of joined products for which a table is worth tuning, and the layers of each."""
    tables = {row.problem.at(1) for row in rows}
    layers: dict[Problem, tuple[str, ...]] = {}
    worth = []
    for one in join_rows(rows):
        product = one.row.problem.at(1)
        if min(part.at(1).bytes for part in one.parts) <= _MOST_PART_BYTES and product not in tables:
            layers.setdefault(product, one.row.callers)
            worth.append(one.row)
    found = {}
    for span in group_spans(worth, m_range):
        high = min(span.high, _MOST_RESULT_BYTES // (span.problem.n * span.problem.c.type.bytes))
        if span.low <= high:
            wanted = tuple(m for m in span.wanted if m <= high)
            found[replace(span, high=high, wanted=wanted)] = layers[span.problem]
    return found


def saved_seconds(product: Problem, joined: float, parts: Iterable[float]) -> float:
    """Return what one product for all saves over a product for each layer; 0 where it is hardly faster or slower.

    Where the joined product has more than one row, its parts are columns, which are slower to read.
    """
    apart, result_bytes = sum(parts), product.m * product.n * product.c.type.bytes
    reading = _COLUMNS_SECONDS + _COLUMNS_SECONDS_A_BYTE * result_bytes if product.m > 1 else 0.0
    together = joined + reading
    return apart - together if together * _LEAST_GAIN <= apart else 0.0


def saved_by_joining(joined: Sequence[JoinedRow], records: Mapping[Problem, Record]) -> float:
    """Return the seconds that a workload's calls save where layers are joined, of those that have records."""
    saved = 0.0
    for one in joined:
        found = [records.get(problem) for problem in (one.row.problem, *one.parts)]
        seconds = [record.served_seconds for record in found if record is not None]
        if len(seconds) == len(found):
            saved += one.row.count * saved_seconds(one.row.problem, seconds[0], seconds[1:])
    return saved


def _is_layer(problem: Problem) -> bool:
    p = problem
    return p.bias != "m" and p == Problem(
        p.m, p.n, p.k, *matrices(p.a.dtype, p.b.dtype, p.c.dtype, layout="TN"), bias=p.bias
    )
