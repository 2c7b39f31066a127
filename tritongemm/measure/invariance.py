"""The order in which each product of an invariant run adds up, and the comparison of bits in its races."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import PAIRS, ReductionOrder
from tritongemm.core.space import SearchLimits, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.numerics import shared_rows
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, LibraryBackend, SearchedBackend
from tritongemm.plugins.validity import check_order

# Of narrow products tiles of few rows leave compute units idle unless K is split: on an H200 that cost a fifth at N
# 1280 and M 16, and at N 2560 it gained nothing. At more rows one program adds up the runs of all splits.
_FEW_ROWS, _COLUMNS, _NARROW, _FULL, _SHORTEST_RUN, _STEP = 64, 32, 0.55, 2, 1024, 256
_RUN_STEP = 32  # of a run of K: the least depth of a block
LIBRARY = ("library", "cublas", "hipblaslt")  # names by which algorithms of the library are let race
_LARGEST = {"block_m": 128, "block_n": 128, "num_warps": 8}  # of a tile of many rows


class Invariance:
    """The reduction orders of a run's products, and what their rows' bits were found to be.

    Args:
        orders: the orders that each product may have, by its problem of M 1; the first holds until one is decided on.
        with_libraries: whether algorithms of a library that does not split K race too; their bits decide.
    """

    def __init__(self, orders: Mapping[Problem, Sequence[ReductionOrder]], with_libraries: bool = False) -> None:
        self.orders, self.with_libraries = dict(orders), with_libraries
        self._bits: dict[Problem, str] = {}
        self._lock = threading.Lock()

    def order(self, problem: Problem) -> ReductionOrder:
        """Return the order of a problem's product."""
        return self.orders[problem.at(1)][0]

    def decide(self, product: Problem, order: ReductionOrder) -> None:
        """Have a product add up in one of its orders alone."""
        self.orders[product] = (order,)

    def note(self, records: Iterable[Record], target: Target) -> None:
        """Note the orders and the bits of a run's stored results.

        Raises:
            InputError: a result is of another order than this run's, or states one that its kernel does not have.
        """
        for record in records:
            product = record.problem.at(1)
            wanted = {str(order): order for order in self.orders[product]}
            if record.order not in wanted:
                found = f"adds up in the order {record.order}" if record.order else "states no order of additions"
                others = f"this run's add up in the order {' or '.join(wanted)}"
                raise InputError(
                    f"the file of -o has a result of {record.problem.key} that {found}, and {others}: name another file"
                )
            if not (stated := check_order(record, target)):
                raise InputError(f"the result of {record.problem.key}: {stated}; delete its row, or name another file")
            self.decide(product, wanted[record.order])
            self._bits.setdefault(product, record.row_bits)

    def allows(self, config: Config, problem: Problem, target: Target) -> bool:
        """Say whether a config may race: its order is the product's, or a library states none but an unsplit K."""
        backend, wanted = registry.get(Backend, config.backend), self.order(problem)
        order = backend.reduction_order(config, problem, target)
        if not isinstance(backend, LibraryBackend) or backend.states_orders:
            return order == wanted
        return self.with_libraries and isinstance(order, ReductionOrder) and order.runs == wanted.runs == 1

    def compare(self, problem: Problem, result: RaceResult) -> RaceResult:
        """Return a race without the candidates whose rows have other bits than the product's at other M.

        The first race of a product decides what these are, by most of the kernels.
        """
        passed = [t for t in result.trials if t.status == "ok"]
        kernels = [t for t in passed if not isinstance(registry.get(Backend, t.config.backend), LibraryBackend)]
        with self._lock:
            votes = Counter(t.row_bits for t in kernels or passed).most_common(1)
            known = self._bits.setdefault(problem.at(1), votes[0][0]) if votes else ""
        trials = tuple(self._with_bits(t, problem, known) for t in result.trials)
        names = {t.config.name for t in trials if t.status == "wrong"}
        samples = {name: found for name, found in result.samples.items() if name not in names}
        return replace(result, trials=trials, samples=samples)

    def _with_bits(self, trial: Trial, problem: Problem, known: str) -> Trial:
        if trial.status != "ok" or trial.row_bits == known:
            return trial
        reason = f"its rows have other bits than those of the order {self.order(problem)}"
        return replace(trial, status="wrong", reason=reason, samples=())


def possible_orders(
    problems: Iterable[Problem], target: Target, backend: str, limits: SearchLimits, runs: int = 1
) -> dict[Problem, tuple[ReductionOrder, ...]]:
    """Return the orders that may be the best of each product, by its problem of M 1: that of an unsplit K first.

    Of several such orders it is that of the templates that are made for many rows, with deep blocks: they are fastest
    where a product costs most. Narrow products of few rows may have that of splits too, which fill the device.

    Args:
        problems: all that a run tunes.
        target: where.
        backend: the backend that is searched.
        limits: what may be tried.
        runs: equal runs of K whose sums are added pairwise: the only order then; 1 for any.

    Raises:
        InputError: a product's rows can't be compared, no config of it has a stated order, or K has no such runs.
    """
    largest, least = dict[Problem, Problem](), dict[Problem, int]()
    for problem in problems:
        if not (comparable := shared_rows.supports(problem)):
            raise InputError(f"--invariant: {comparable}")
        product = problem.at(1)
        least[product] = min(problem.m, least.get(product, problem.m))
        largest[product] = max(problem, largest.get(product, problem), key=lambda one: one.m)
    searched: SearchedBackend = registry.get(SearchedBackend, backend)
    orders = {product: _unsplit_order(problem, target, searched, limits) for product, problem in largest.items()}
    if runs > 1:
        return {product: (_pairwise(order, product, runs),) for product, order in orders.items()}
    few = {product for product, m in least.items() if m <= _FEW_ROWS and _is_narrow(product, target)}
    return {
        product: (order, *(_split_orders(order, product, target, limits) if product in few else ()))
        for product, order in orders.items()
    }


def _pairwise(order: ReductionOrder, product: Problem, runs: int) -> ReductionOrder:
    """Return the order of equal runs of K whose sums are added pairwise, as those of as many ranks are."""
    step = order.block or _RUN_STEP
    if not order.k:
        return order
    if order.k % (runs * step):
        raise InputError(f"--invariant-runs {runs}: K {order.k} of {product.product} is no multiple of {runs} x {step}")
    return replace(order, run=order.k // runs, sums=PAIRS if runs > 2 else "")


def _is_narrow(product: Problem, target: Target) -> bool:
    """Return whether tiles of few rows leave compute units idle."""
    return cdiv(product.n, _COLUMNS) * product.batch <= _NARROW * target.compute_units


def _split_orders(
    unsplit: ReductionOrder, product: Problem, target: Target, limits: SearchLimits
) -> Iterator[ReductionOrder]:
    """Yield the orders of splits that fill the device with a narrow product's tiles of few rows.

    Of scaled blocks kernels add up two runs in one program, not more: there two splits are enough.
    """
    tiles = cdiv(product.n, _COLUMNS) * product.batch
    for splits in (2, 4, 8):
        fits = tiles * splits <= _FULL * target.compute_units and splits <= (limits.most_splits or splits)
        divides = unsplit.k >= splits * _SHORTEST_RUN and unsplit.k % (splits * _STEP) == 0
        if unsplit.k and fits and divides and (splits == 2 or not unsplit.block):
            yield replace(unsplit, run=unsplit.k // splits)


def _unsplit_order(problem: Problem, target: Target, searched: SearchedBackend, limits: SearchLimits) -> ReductionOrder:
    """Return the order of a config for many rows that does not split K."""
    depth = 128 if problem.microscaled else min(problem.scale_depth or 128, 128)
    for axes in sorted(limits.narrow(searched.space(problem, target)).axes, key=_is_for_few):
        config = _nearest(axes, _LARGEST | {"block_k": depth, "split_k": 1})
        order = searched.reduction_order(config, problem, target)
        able = isinstance(order, ReductionOrder) and order.runs == 1 and config.split_k == 1
        if isinstance(order, ReductionOrder) and able and searched.check(config, problem, target):
            return order
    raise InputError(f"--invariant: no config of {problem.key} states in which order it adds up products")


def _nearest(axes: TemplateSpace, sizes: Mapping[str, int]) -> Config:
    """Return the config of a template whose axes are nearest to these sizes, at the first value of all others."""
    wanted = ((values, sizes.get(name, values[0])) for name, values in axes.values)
    return axes.config(tuple(min(values, key=lambda value: abs(value - size)) for values, size in wanted))


def _is_for_few(axes: TemplateSpace) -> tuple[bool, bool]:
    """Return a key that sorts templates for many rows first."""
    facts = search_facts(axes.template)
    return not facts.matrix, "warp_roles" not in facts.rules
