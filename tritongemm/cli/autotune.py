"""Tunes from Python: `tritongemm.autotune`, and the results that it returns."""

from __future__ import annotations

import argparse
import html
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.cli import arguments, options
from tritongemm.cli import report as report_command
from tritongemm.core.errors import InputError, RemarkWarning
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.formats import read_text, results_format
from tritongemm.report.alike_lines import summarise
from tritongemm.report.listener import Listener
from tritongemm.report.progress import RunProgress
from tritongemm.report.tables import print_invariance
from tritongemm.results import tuned_file
from tritongemm.results.rewriting import place_of
from tritongemm.tune import requested_run
from tritongemm.tune.request import SizeSource, TuneRequest
from tritongemm.tune.request import effort as effort_named
from tritongemm.workloads.sizes import Size

if TYPE_CHECKING:
    import torch

    from tritongemm.serving.loaded_tables import LoadReport


@dataclass(frozen=True, repr=False)
class Results:
    """The results of `autotune`, which print as a table. A sequence of records.

    Attributes:
        records: one for each size; of tables over M one for each range.
        path: the results file, which has them too.
        failures: reasons of the sizes that have no result.
        remarks: what the run said, a line each.
        target: what was tuned for.

    Examples:
        >>> results = tritongemm.autotune([(16, 16, 16)], target="gfx1100", budget=1, output="tuned.yaml")
        >>> len(results), results[0].problem.m, results.path.name
        (1, 16, 'tuned.yaml')
    """

    records: tuple[Record, ...]
    path: Path
    failures: Mapping[Problem, str]
    remarks: tuple[str, ...]
    target: Target
    _journal: Path = field(repr=False)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, place: int) -> Record:
        return self.records[place]

    def __str__(self) -> str:
        listener = Listener(lambda progress: None)
        if self.records:
            compared = any(record.library_seconds is not None for record in self.records)
            listener.records(self.records, self.target, compare=compared)
        if any(record.order for record in self.records):
            print_invariance(listener, self.records, (), {})
        failed = [f"failed: {problem.key}: {reason}" for problem, reason in self.failures.items()]
        return "\n".join([*listener.tables.splitlines(), *listener.lines, *failed]) or "no results"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def load(self) -> LoadReport:
        """Serve the results at once, as `tritongemm.load` does; return what of them serves this GPU."""
        from tritongemm.serving.api import load

        return load(self.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the results into a file, whose other results are kept.

        Args:
            path: YAML, or the name of another tool's file, such as ``bf16_tuned_gemm.csv``. What such a file can't hold
                is said in a warning.

        Raises:
            InputError: the format is not clear, the file has sizes without results, or can hold none of these.
            OutputError: the file can't be written.
        """
        place, kept = Path(path), dict[object, Record]()
        format_ = tuned_file.output_format(place)
        with tuned_file.held(place):
            if format_ is results_format() and place.is_file() and (text := read_text(place)).strip():
                rows = format_.read_usable(place, text, SizeSource().defaults).require_undamaged().rows
                if any(row.record is None for row in rows):
                    raise InputError(f"{place} holds sizes without a result, which would be lost; name another file")
                kept = {place_of(row.record): row.record for row in rows if row.record is not None}
            kept |= {place_of(record): record for record in self.records}
            written = tuned_file.write(place, format_, kept.values())
        omitted = list(summarise((f"{record.problem.key}: {reason}" for record, reason in written.omitted), how=""))
        if omitted and not written.count:
            raise InputError(f"{place} is not written, as it can't hold {'; '.join(omitted)}")
        for line in omitted:
            warnings.warn(f"{place}: {line}", RemarkWarning, stacklevel=2)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Draw the results as one HTML page, as `tritongemm report` does.

        Args:
            path: the page; a report that is there is replaced.

        Raises:
            OutputError: the page can't be written.
            UnavailableError: plotly is not installed.
        """
        report_command.draw_page(Path(path), self.records, self._journal)


def autotune(
    sizes: Sequence[Size] | str | os.PathLike[str] | TuneRequest,
    *,
    dtype: str | torch.dtype | None = "bf16",
    effort: str = "normal",
    budget: int | str | None = None,
    target: str | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[RunProgress], object] | None = None,
    invariant: bool | str = False,
) -> Results:
    """Tune GEMMs C[M, N] = A[M, K] @ B[K, N], race them with the library, and return the results.

    Results go to disk as they are made. After a KeyboardInterrupt, or a crash, the same call continues with what is
    missing; a call whose sizes all have results returns them. Without a GPU, or for a target that is not here, times
    are predicted.

    Args:
        sizes: (m, n, k) tuples, problems, or mappings with the keys of a size file, such as ``{"M": 16, "N": 4096,
            "K": 4096, "bias": "n"}``; or the path of a size file. B is column-major where a size does not say it, as
            `mm(x, w)` with w [N, K] has it. Or a `TuneRequest`, which says everything that is said here and more.
        dtype: type of A, B and C where a size does not say it; None for that of its family.
        effort: ``quick``, ``normal`` or ``full``, as of `--effort`.
        budget: most configs tried for each size; or, as ``"90s"``, seconds after which no new config is tried. None for
            what the effort says.
        target: architecture or a GPU's name; None for this machine's GPU.
        output: results file (default ``output/tuning_results_<target>.yaml``).
        progress: called in this thread with a `RunProgress` when a size is done, and about once a second meanwhile; an
            exception of it ends the run. None for a line of progress where the standard error is a terminal.
        invariant: give a row the same bits at every M, as `--invariant`; ``"library"`` as `--invariant=library`.

    Raises:
        InputError: a size, name or budget can't be.
        OutputError: a file can't be written, or another run holds the output.
        KeyboardInterrupt: the run was interrupted; its message names the file that has the finished work.
        TypeError: a request is given together with what it has itself.

    Examples:
        >>> results = tritongemm.autotune([(16, 16, 16)], target="gfx1100", budget=1, output="tuned.yaml")
        >>> [record.problem.key for record in results]
        ['16x16x16_bf16_TN']
        >>> tritongemm.autotune([(16, 16, 0)], target="gfx1100")
        Traceback (most recent call last):
        tritongemm.core.errors.InputError: sizes: row 1 (line 1) K must be at least 1, not 0
    """
    if not isinstance(sizes, TuneRequest):
        request = replace(_request(sizes, dtype, effort, budget, target, output), invariant=invariant)
    elif (dtype, effort, budget, target, output, invariant) == ("bf16", "normal", None, None, None, False):
        request = sizes
    else:
        raise TypeError(
            "a TuneRequest has dtype, effort, budget, target, output and invariant of its own; set them there"
        )
    listener = Listener(progress, request.search.seconds)
    with listener:
        outcome = requested_run.tune(request, listener)
    tables = [record for table in outcome.tables.values() for record in table.records()]
    untunable = [f"not tuned: {row.reason}" for row in outcome.untunable]
    return Results(
        tuple(tables or outcome.records),
        outcome.store.path,
        outcome.failures,
        (*listener.lines, *untunable),
        outcome.target,
        outcome.store.journal,
    )


def _request(
    sizes: Sequence[Size] | str | os.PathLike[str],
    dtype: str | torch.dtype | None,
    effort: str,
    budget: int | str | None,
    target: str | None,
    output: str | os.PathLike[str] | None,
) -> TuneRequest:
    """Return the request that the arguments of `autotune` make."""
    effort_named(effort)
    try:
        limit = None if budget is None else arguments.budget(str(budget))
        named = options.dtype(str(dtype).removeprefix("torch.")) if dtype is not None else ""
        path = None if output is None else Path(arguments.output_file(os.fspath(output)))
    except argparse.ArgumentTypeError as error:
        raise InputError(str(error)) from None
    asked = TuneRequest()
    defaults = Defaults.of(named, layout="TN")
    if isinstance(sizes, (str, os.PathLike)):
        source = SizeSource(path=Path(sizes), defaults=defaults)
    elif isinstance(sizes, Iterable) and not isinstance(sizes, bytes):
        source = SizeSource(given=tuple(sizes), defaults=defaults)
    else:
        raise InputError(f"sizes is {sizes!r}; give a list of (m, n, k), or a file's name")
    return replace(
        asked,
        sizes=source,
        devices=replace(asked.devices, target=None if target is None else options.architecture(str(target))),
        search=replace(asked.search, effort=effort, budget=limit),
        outputs=replace(asked.outputs, path=path),
    )
