"""The stage that races the same few configs at both products of each layer of experts, once the products are tuned.

A server launches one config for both products of a layer, so the fastest config of each product alone does not decide:
configs that were fastest at one product are raced at the other too.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from tritongemm.core.config import Config
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.tune.run import TuningRun
from tritongemm.tune.table_tuning import RacingDevice, TableTuning

_FASTEST = 4  # configs of each product that race at all products of its layer


class LayerTuning:
    """Races configs at all products of a layer."""

    def __init__(self, run: TuningRun, can_express: Callable[[Config], bool]) -> None:
        self._run, self._can_express, self._races = run, can_express, TableTuning(run)

    def tune(self, rows: Sequence[FormatRow]) -> None:
        """Race at each product of a layer the configs that were fastest at one of them, and the server's own.

        The products of a layer are adjacent rows with the same number.
        """
        layers = [[row.problem for row in layer] for _, layer in groupby(rows, key=lambda row: row.number)]
        self._run.watcher.stage("layers", len(layers))
        devices = self._races.devices()

        def work(number: int) -> None:
            if self._races.in_time():
                self._race(layers[number], devices[number % len(devices)])
            self._run.watcher.step("layers")

        with ThreadPoolExecutor(len(devices)) as pool:
            list(pool.map(work, range(len(layers))))

    def _race(self, layer: Sequence[Problem], device: RacingDevice) -> None:
        chosen = dict.fromkeys(self._run.options.limits.first)
        for problem in layer:
            screened = self._races.screened(problem)
            fastest = sorted(filter(self._can_express, screened), key=screened.__getitem__)
            chosen |= dict.fromkeys(fastest[:_FASTEST])
        for problem in layer:
            self._races.race(problem, chosen, device)
