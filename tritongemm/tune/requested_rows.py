"""Stage: a request → the rows that its run tunes, and its tables over M."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics.computable_families import defaults_on, in_fastest_order, is_computed_by, name_others
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, Watcher
from tritongemm.search_spaces.loader import load_target, target_names
from tritongemm.tune import servers
from tritongemm.tune.request import SizeSource, TuneRequest
from tritongemm.workloads import sizes
from tritongemm.workloads.m_spans import SEARCH_BUDGET, MSpan, drop_small, group_spans
from tritongemm.workloads.model_sizes import from_model
from tritongemm.workloads.sibling_layers import joined_spans


def read_rows(request: TuneRequest, target: Target, say: Callable[[str], None]) -> ResultsFile:
    """Read the sizes of a request; none may be damaged."""
    source = request.sizes
    defaults = defaults_on(target, source.defaults)
    if source.given:
        return ResultsFile(rows=tuple(sizes.from_values(source.given, defaults)))
    if source.model is not None:
        model = from_model(source.model.place, source.model.tp, source.model.tokens, defaults, source.model.every_bias)
        for remark in model.remarks:
            say(remark)
        if defaults.family != Defaults.family:  # which says the order too
            return ResultsFile(rows=model.rows)
        arch = target.name
        return ResultsFile(rows=tuple(replace(r, problem=in_fastest_order(r.problem, arch)) for r in model.rows))
    if source.path is not None:
        found = sizes.from_results(source.path, defaults).require_undamaged()
        if not found.rows:
            reason = f"{found.untunable[0].reason}; no row of the file can" if found.untunable else ""
            raise InputError(reason or f"{source.path} contains no sizes; write one line per size")
        # AITER's files say no order of a weight of four bits, which is converted when it is loaded.
        rows = (
            replace(r, problem=in_fastest_order(r.problem, target.name)) if r.optional and r.config is None else r
            for r in found.rows
        )
        return replace(found, rows=tuple(rows))
    m = source.m_range[0] if source.m is None and source.m_range else source.m
    if source.n is None or source.k is None or (m is None and request.search.server is None):
        raise InputError("there are no sizes to tune; name at least one")
    if request.search.server is not None and (m is None or request.search.top_k is not None):
        tokens, top_k = () if m is None else (m,), request.search.top_k or 1
        server = servers.format_of(request)
        return ResultsFile(rows=tuple(server.list_sizes(source.n, source.k, defaults, top_k, tokens)))
    return ResultsFile(rows=tuple(sizes.from_options(m or 0, source.n, source.k, defaults)))


def select(rows: Sequence[FormatRow], target: Target, source: SizeSource, watcher: Watcher) -> list[FormatRow]:
    """Return the rows that a target computes, and report which are left out.

    Rows of a workload or a model are left out one by one, and those that only another target computes, of a file for
    several targets, in one line. Any other row must be one that the target computes.
    """
    kept, others, lacking = list[FormatRow](), list[str](), list[str]()
    for row in rows:
        complaint = complain(row, target, source)
        if not complaint:
            kept.append(row)
        elif is_for_another_target(row):
            others.append(complaint)
        elif source.may_lack:
            lacking.append(f"left out: {complaint}")
        else:
            raise InputError(complaint)
    watcher.say_alike(lacking)
    if not kept:
        raise InputError(others[0] if others else f"{source.path}: {target.name} can compute none of its products")
    if others:
        more = f", and {len(others) - 1} others" if len(others) > 1 else ""
        watcher.say(f"left out, as another target computes it{more}: {others[0]}")
    return kept


def complain(row: FormatRow, target: Target, source: SizeSource) -> str:
    """Return why a row can't be tuned for a target, with the row's place; "" if it can."""
    where = "" if source.path is None else f"{row.where(str(source.path))}: "
    if row.problem.masked and (source.is_workload or source.m_range is not None):
        return f"{where}{row.problem.key}: groups with room of their own have no tables over M; tune each as a size"
    supported = registry.get(Family, row.problem.family).supports(row.problem, target)
    if supported:
        return ""
    return f"{where}{row.problem.key}: {supported}{name_others(row.problem, target)}"


def is_for_another_target(row: FormatRow) -> bool:
    """Return whether a row that the run's target can't compute is of a file for several, and another computes it."""
    return row.optional and is_computed_by(row.problem, map(load_target, target_names()))


def read_spans(rows: Sequence[FormatRow], source: SizeSource, say: Callable[[str], None]) -> list[MSpan]:
    """Return the spans of M of tables, none where only sizes are requested, and report what is left out."""
    if not source.is_workload:
        tokens = min(source.model.tokens) if source.model else 0
        return [] if source.m_range is None else group_spans(rows, source.m_range, tokens)
    kept, small = drop_small(rows)
    for product, share in small.items():
        reason = f"{share:.2%} of the workload's time, estimated from bytes and operations"
        say(f"left out: {product.product}: {reason}")
    joined = joined_spans(kept, source.m_range) if source.join else {}
    for span, layers in joined.items():
        say(f"joined: {span.problem.product}, M up to {span.high}: {', '.join(layers)}")
    return [*group_spans(kept, source.m_range), *joined]


def list_searched(spans: Iterable[MSpan]) -> list[Problem]:
    """Return the sizes of tables that are tuned as any size is."""
    return [span.at(m) for span in spans for m in span.searched()]


def list_measured(spans: Iterable[MSpan]) -> list[Problem]:
    """Return all sizes of tables that are measured whatever is found, in the order of their rows."""
    return [span.at(m) for span in spans for m in span.ladder()]


def search_budgets(spans: Iterable[MSpan]) -> dict[Problem, int]:
    """Return the most configs to try at searched M that no call is known to have, which race again at other M."""
    return {span.at(m): SEARCH_BUDGET for span in spans for m in span.searched() if m not in span.wanted}
