"""Both products of a layer of experts: the same configs race at each, so that one can be written for the layer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.stores import TOOLS, take
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.trial import Trial
from tritongemm.formats import Defaults
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.report.console import Reporter
from tritongemm.results.tuned_file import TunedFile
from tritongemm.search_spaces import loader as target_files
from tritongemm.tune import servers
from tritongemm.tune.layer_tuning import LayerTuning
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.request import SearchScope, SizeSource, TuneRequest
from tritongemm.tune.task import make_record

NAME = "E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
TARGET = target_files.load_target("sm90", compute_units=132)
TILES = [Config("grouped_tile", 16, n, 128, 1, num_warps=4, num_stages=s) for n in (32, 64, 128) for s in (2, 3, 4, 5)]
MACHINE = {**TOOLS, "device": "NVIDIA H200"}


def seconds_of(config: Config, problem: Problem) -> float:
    """Wide tiles for gate and up, narrow ones for down, and 64 columns nearly as fast at both."""
    best = 128 if problem.n == 512 else 32
    return 1e-6 * (10 + 3 * (config.block_n != best) + 6 * (config.block_n == 160 - best) + config.num_stages / 10)


class ScriptedEvaluator(FakeEvaluator):
    """A device on which each product has another fastest config."""

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Ten equal rounds, without a baseline."""
        configs = [a.config for a in artifacts]
        samples = {c.name: (seconds_of(c, problem),) * 10 for c in configs}
        trials = tuple(Trial(c, "ok", "", samples[c.name], "sundial", "final", 0.0, 0.1) for c in configs)
        return RaceResult(trials, samples, True)


@pytest.mark.parametrize("backend", ["triton", "vllm"])
def test_the_configs_of_both_products_race_at_each(backend: str, tmp_path: Path) -> None:
    """Of template `grouped_tile`, or of the server's own kernel, which has the same tiles."""
    tiles = [replace(config, backend=backend) for config in TILES]
    server = registry.get(ServerFormat, "vllm_moe_json")
    rows = server.list_sizes(256, 1024, Defaults(family="a8w8_blockscale", groups=Groups(8)), 2, (16,))
    evaluator = ScriptedEvaluator("sm90")
    evaluator.target = TARGET
    source = SizeSource(defaults=Defaults(family="a8w8_blockscale", groups=Groups(8)))
    request = TuneRequest(source, search=SearchScope(server="vllm"))
    limits = servers.limits(request, Machine(TARGET, "nvidia", (0,), "H200", ""), [backend])
    assert {config.backend for config in limits.first} == {backend}
    options = TuningOptions(Path("unused"), backends=(backend,), toolchain=MACHINE, limits=limits)
    reported = TunedFile.find(tmp_path / NAME)
    assert reported is not None
    with take(reported.results, target="sm90", toolchain=MACHINE) as store:
        for problem in (row.problem for row in rows):
            fastest = sorted(tiles, key=lambda c: seconds_of(c, problem))
            screens = [Trial(c, "ok", samples=(seconds_of(c, problem),), timer="sundial") for c in tiles]
            result = evaluator.race(problem, [Artifact(c, "") for c in fastest[:2]], "")
            record = make_record(problem, result, TARGET, options, frozenset(), "by eye")
            store.add_trials(problem, [*screens, *result.trials], record)
        pool = SimpleNamespace(stream=lambda jobs: iter([Artifact(job.config, job.digest) for job in jobs]))
        run: Any = SimpleNamespace(
            store=store, options=options, evaluators=[evaluator], pool=pool, watcher=Reporter(), ends=inf
        )
        LayerTuning(run, server.can_express).tune(rows)
        raced = [{t.config for (_, stage), t in store.trials(row.problem).items() if stage == "final"} for row in rows]
        assert raced[0] == raced[1] and raced[0] >= {*limits.first} and len(raced[0]) > len(limits.first) + 4
        found = reported.write(store, [row.problem for row in rows], rows)
    assert found.count == 2 and not found.omitted
    table = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    sums = {c: sum(seconds_of(c, row.problem) for row in rows) for c in raced[0]}
    best = min(sums, key=sums.__getitem__)
    assert (table["16"]["BLOCK_SIZE_N"], table["16"]["num_stages"]) == (best.block_n, best.num_stages)
    assert replace(best, num_stages=2) in tiles or best in limits.first
