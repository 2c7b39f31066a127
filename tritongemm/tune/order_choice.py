"""Chooses by races in which order a product of an invariant run adds up, where several orders may be the fastest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, log
from pathlib import Path

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.invariance import Invariance
from tritongemm.results.store import Store
from tritongemm.system.temporary_folder import TemporaryFolder
from tritongemm.tune.run import TuningRun

COMPARED = 5  # M of a product at which its orders are compared, from the least to the largest
BUDGET, FINALISTS = 24, 4  # configs tried of each order at each of them, and those that race
_SHARE_OF_TIME = 0.05  # of a run of limited time, which the races of each order may take
_ALIKE = 0.98  # share of the best order's figure from which the first order is taken


def choose(
    run: TuningRun, problems: Sequence[Problem], open_store: Callable[[Path], Store], races: bool = True
) -> None:
    """Decide on the order of each product of a run that may have several: that of its stored results, or by races.

    At some M of a product, from the least to the largest, its orders are compared; the one that loses least at any of
    them is taken.

    Args:
        run: its options have the orders of each product.
        problems: all that the run tunes.
        open_store: opens a results file of such a run.
        races: whether kernels can be timed; if not, the first order is taken.

    Raises:
        InputError: a stored result has none of its product's orders.
    """
    invariance = run.options.invariance
    assert invariance is not None
    invariance.note(filter(None, map(run.store.record, problems)))
    if races:
        _choose_by_races(run, invariance, problems, open_store)


def _choose_by_races(
    run: TuningRun, invariance: Invariance, problems: Sequence[Problem], open_store: Callable[[Path], Store]
) -> None:
    orders = {product: those for product, those in invariance.orders.items() if len(those) > 1}
    sizes = {product: _compared(problems, product) for product in orders}
    costs: dict[Problem, list[list[float]]] = {product: [] for product in orders}
    for rank in range(max(map(len, orders.values()), default=0)):
        raced = {product: those[rank] for product, those in orders.items() if rank < len(those)}
        found = _race(run, [p for product in raced for p in sizes[product]], raced, open_store)
        for product in raced:
            costs[product].append([_cost(found[p]) for p in sizes[product]])
    for product, those in orders.items():
        shares = least_shares(costs[product])
        best = 0 if shares[0] >= _ALIKE * max(shares) else shares.index(max(shares))
        invariance.decide(product, those[best])
        text = ", ".join(f"{order} {share:.3f}" for order, share in zip(those, shares, strict=True))
        at = ", ".join(str(p.m) for p in sizes[product])
        run.watcher.say(
            f"{product.product}: order {those[best]}; least share of the fastest order's speed at M {at}: {text}"
        )


def least_shares(costs: Sequence[Sequence[float]]) -> list[float]:
    """Return for each order the least, over sizes, of the fastest order's time over its own."""
    fastest = [min(at_size) for at_size in zip(*costs, strict=True)]
    return [min(least / cost if cost < inf else 0.0 for least, cost in zip(fastest, own, strict=True)) for own in costs]


def _compared(problems: Sequence[Problem], product: Problem) -> list[Problem]:
    """Return the sizes at which a product's orders are compared, evenly over the powers of two."""
    every = sorted((p for p in problems if p.at(1) == product), key=lambda p: p.m)
    low, high = every[0].m, every[-1].m
    wanted = (low * (high / low) ** (i / (COMPARED - 1)) for i in range(COMPARED))
    return list(dict.fromkeys(min(every, key=lambda p: abs(log(p.m / m))) for m in wanted))


def _race(
    run: TuningRun,
    problems: Sequence[Problem],
    orders: Mapping[Problem, ReductionOrder],
    open_store: Callable[[Path], Store],
) -> dict[Problem, Record | None]:
    """Return the results of a short search of sizes whose products have these orders."""
    assert run.options.invariance is not None
    only = {product: (order,) for product, order in orders.items()}
    with TemporaryFolder() as folder, open_store(folder / "orders.yaml") as store:
        options = replace(
            run.options,
            folder=folder,
            strategy="guided",
            budget=BUDGET,
            budgets={},
            finalists=FINALISTS,
            seconds=run.options.seconds * _SHARE_OF_TIME,
            invariance=Invariance(only, run.options.invariance.with_libraries),
        )
        TuningRun(run.evaluators, run.pool, store, options, run.watcher).tune(problems)
        return {problem: store.record(problem) for problem in problems}


def _cost(record: Record | None) -> float:
    """Return a result's time, in units of the library's in the same race where that computes it."""
    return inf if record is None else record.seconds / (record.library_seconds or 1.0)
