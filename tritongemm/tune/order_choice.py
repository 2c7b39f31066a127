"""Chooses by races in which order a product of an invariant run adds up, where several orders may be the fastest."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import exp, inf, log
from operator import mul
from pathlib import Path

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.invariance import Invariance
from tritongemm.results.store import Store
from tritongemm.search.cost_model import model as cost_model
from tritongemm.system.temporary_folder import TemporaryFolder
from tritongemm.tune import roster
from tritongemm.tune.run import TuningRun
from tritongemm.tune.search_processes import Planner, RankJob
from tritongemm.workloads.m_spans import FINE_UP_TO, MSpan

COMPARED = 6  # most M of a product at which its orders are compared, from the least to the largest
DECISIVE, _LOSS = 2, 1.03  # and most M where an order is expected to take longer than another, by this factor or more
_APART, _NTH = 1.5, 3  # factor from one of these M to the next; of those from 64 on, which are asked for that
BUDGET, FINALISTS = 24, 4  # configs tried of each order at each of them, and those that race
_SHARE_OF_TIME = 0.1  # of a run of limited time, which the races of each order may take
_LEAST_S = 8.0  # less time than this gives no order a fair race
_NO_SPEED = 1e-3  # of an order that has no kernel at a size
_ALIKE = 0.98  # share of the best order's least speed from which an order is compared by its mean


def choose(
    run: TuningRun,
    problems: Sequence[Problem],
    open_store: Callable[[Path], Store],
    rows: Sequence[FormatRow] = (),
    spans: Sequence[MSpan] = (),
    races: bool = True,
) -> None:
    """Decide on the order of each product of a run that may have several: that of its stored results, or by races.

    At some M of a product, from the least to the largest, and where the cost model expects an order to lose most, its
    orders are compared with the library. The one whose least share of its speed is the greatest is taken, and of
    several that are alike in this the fastest on average.

    Args:
        run: its options have the orders of each product.
        problems: all that the run tunes.
        open_store: opens a results file of such a run.
        rows: what it was asked for: the mean is by the time of their calls, if they say how many there are.
        spans: of tables over M: what their rows may serve is compared too.
        races: whether kernels can be timed; if not, or if too little time is left, the first order is taken.

    Raises:
        InputError: a stored result has none of its product's orders.
    """
    invariance = run.options.invariance
    assert invariance is not None
    beside = (r for r in run.store.beside(frozenset(problems)) if r.problem.at(1) in invariance.orders)
    invariance.note(filter(None, (*map(run.store.record, problems), *beside)), run.evaluators[0].target)
    limit = run.options.seconds * _SHARE_OF_TIME
    if races and (limit == 0 or limit >= _LEAST_S):
        between = [span.at(m) for span in spans for m in span.between()]
        _choose_by_races(run, invariance, list(dict.fromkeys([*problems, *between])), open_store, rows)
    elif races:
        for product, those in invariance.orders.items():
            if len(those) > 1:
                run.watcher.say(
                    f"{product.product}: order {those[0]}, not compared with {', '.join(map(str, those[1:]))}, "
                    f"which takes a --budget of {_LEAST_S / _SHARE_OF_TIME:.0f}s or more"
                )


def _choose_by_races(
    run: TuningRun,
    invariance: Invariance,
    problems: Sequence[Problem],
    open_store: Callable[[Path], Store],
    rows: Sequence[FormatRow],
) -> None:
    orders = {product: those for product, those in invariance.orders.items() if len(those) > 1}
    sizes = _compared(run, problems, orders)
    results: dict[Problem, list[list[Record | None]]] = {product: [] for product in orders}
    for rank in range(max(map(len, orders.values()), default=0)):
        raced = {product: those[rank] for product, those in orders.items() if rank < len(those)}
        found = _race(run, [p for product in raced for p in sizes[product]], raced, open_store)
        for product in raced:
            results[product].append([found[p] for p in sizes[product]])
    for product, those in orders.items():
        speeds = _speeds(results[product])
        weights = _weights(results[product], sizes[product], [row for row in rows if row.problem.at(1) == product])
        every = len(sizes[product]) == sum(p.at(1) == product for p in problems)
        best = choose_order(speeds, weights, every)
        invariance.decide(product, those[best])
        listed = (f"{those[i]} {min(own):.3f} (mean {_mean(own, weights):.3f})" for i, own in enumerate(speeds))
        at = ", ".join(str(p.m) for p in sizes[product])
        run.watcher.say(f"{product.product}: order {those[best]}; least speed at M {at}: {', '.join(listed)}")


def choose_order(speeds: Sequence[Sequence[float]], weights: Sequence[float], every: bool = True) -> int:
    """Return the place of the order to take.

    Where all sizes are known, those without a loss are alike. Else there may be losses between them, the sooner the
    less an order gains where it gains least.

    Args:
        speeds: of each order at each size, over the library's or the fastest order's; more than 1 is no loss.
        weights: of each size in the mean.
        every: whether these are all sizes that the order will serve.
    """
    least = [min(1.0 if every else inf, *own) for own in speeds]
    alike = [place for place, share in enumerate(least) if share >= _ALIKE * max(least)]
    return max(alike, key=lambda place: _mean(speeds[place], weights))


def _mean(speeds: Sequence[float], weights: Sequence[float]) -> float:
    return exp(sum(map(mul, map(log, speeds), weights)) / sum(weights))


def _weights(
    results: Sequence[Sequence[Record | None]], sizes: Sequence[Problem], rows: Sequence[FormatRow]
) -> list[float]:
    """Return the share of a workload's time that each size stands for, or 1 where no row has several calls."""
    if all(row.count == 1 for row in rows):
        return [1.0] * len(sizes)
    calls = dict.fromkeys(sizes, 0.0)
    for row in rows:
        calls[min(sizes, key=lambda p: abs(log(p.m / row.problem.m)))] += row.count
    seconds = [min((r.seconds for r in at_size if r), default=0.0) for at_size in zip(*results, strict=True)]
    return [calls[size] * each for size, each in zip(sizes, seconds, strict=True)]


def _speeds(results: Sequence[Sequence[Record | None]]) -> list[list[float]]:
    """Return the speed of each order at each size, over the library's, or if it has none there the fastest order's."""
    fastest = [min((r.seconds for r in at_size if r), default=inf) for at_size in zip(*results, strict=True)]
    return [
        [(r.library_seconds or least) / r.seconds if r else _NO_SPEED for r, least in zip(own, fastest, strict=True)]
        for own in results
    ]


def _compared(
    run: TuningRun, problems: Sequence[Problem], orders: Mapping[Problem, Sequence[ReductionOrder]]
) -> dict[Problem, list[Problem]]:
    """Return the sizes at which each product's orders are compared: all, or some evenly and where they differ most."""
    found = {product: sorted((p for p in problems if p.at(1) == product), key=lambda p: p.m) for product in orders}
    even = {product: _evenly(every) for product, every in found.items() if len(every) > COMPARED}
    between = {product: found[product][::_NTH] for product in even if not run.options.seconds}
    asked = {p: orders[product] for product, sizes in between.items() for p in sizes if p.m >= FINE_UP_TO}
    seconds = _expected(run, [(p, order) for p, those in asked.items() for order in those]) if asked else {}
    for product, sizes in even.items():
        expected = {p: [seconds[p, o] for o in those] for p, those in asked.items() if p.at(1) == product}
        more = decisive({p: each for p, each in expected.items() if p not in sizes})
        found[product] = sorted({*sizes, *more}, key=lambda p: p.m)
    return found


def _evenly(every: Sequence[Problem]) -> list[Problem]:
    """Return some of the sizes of a product evenly over the powers of two."""
    low, high = every[0].m, every[-1].m
    wanted = (low * (high / low) ** (i / (COMPARED - 1)) for i in range(COMPARED))
    return [min(every, key=lambda p: abs(log(p.m / m))) for m in wanted]


def _expected(
    run: TuningRun, asked: Sequence[tuple[Problem, ReductionOrder]]
) -> dict[tuple[Problem, ReductionOrder], float]:
    """Return the seconds that the model expects of the fastest kernel of each order; infinite where there is none."""
    target, backend = run.evaluators[0].target, next(filter(roster.is_searched, run.options.backends))
    jobs = [RankJob(p, target, backend, replace(run.options.limits, order=order)) for p, order in asked]
    with closing(Planner.for_problems(len(jobs), run.pool.jobs)) as planner:
        best = zip(asked, planner.best(jobs), strict=True)
        ranked = {one: cost_model.rank(kernels, one[0], target).seconds.tolist() for one, kernels in best}
    return {one: min(seconds, default=inf) for one, seconds in ranked.items()}


def decisive(expected: Mapping[Problem, Sequence[float]]) -> list[Problem]:
    """Return the sizes, apart from each other, where an order is expected to lose most against another.

    Args:
        expected: seconds of each order at each size.
    """
    losses = {p: max(seconds) / min(seconds) for p, seconds in expected.items()}
    found: list[Problem] = []
    for problem in sorted(losses, key=lambda p: -losses[p]):
        if losses[problem] >= _LOSS and all(abs(log(problem.m / known.m)) > log(_APART) for known in found):
            found.append(problem)
    return found[:DECISIVE]


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
