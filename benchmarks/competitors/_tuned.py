"""Our own side: tune with the command line, and make what it recorded launchable."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from _common import command_environment

from competitors import Refused
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.format_row import Defaults
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import PREDICTED, Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend
from tritongemm.workloads import sizes


@dataclass(frozen=True)
class Tuned:
    """Results of our tuner.

    Attributes:
        records: by problem.
        triton: the best Triton config of each problem.
        seconds: of tuning, for the problems tuned in this run; its wall time shared out evenly.
        built: what was compiled, by problem and config.
        failure: the tuner's last words where it failed.
    """

    records: Mapping[Problem, Record] = field(default_factory=dict)
    triton: Mapping[Problem, Config] = field(default_factory=dict)
    seconds: Mapping[Problem, float] = field(default_factory=dict)
    built: Mapping[tuple[Problem, Config], Artifact] = field(default_factory=dict)
    failure: str = ""

    def missing(self, problem: Problem) -> str:
        """Why there is no record."""
        return self.failure or f"{problem.key} has no record"

    def launch(self, problem: Problem, config: Config, target: Target) -> Launch | HostLaunch | None:
        """How to launch a config; None where a library does that by itself.

        Raises:
            Refused: it did not compile.
        """
        backend = registry.get(Backend, config.backend)
        if not isinstance(backend, KernelBackend):
            return None
        built = self.built[problem, config]
        if built.status != "ok":
            raise Refused(f"{config.name}: {built.status}: {built.reason}")
        return backend.launch(built, problem, target)


def tuned(
    problems: Sequence[Problem], target: Target, output: Path, folder: Path, strategy: str, device: int = 0
) -> Tuned:
    """The records of `problems` in a results file; those that lack one are tuned first, with a cold cache.

    Args:
        problems: sizes.
        target: where they run.
        output: the results file, there or not.
        folder: for binaries and modules.
        strategy: of the search; "" for the tuner's own choice.
        device: ordinal.
    """
    known = recorded(output, target)
    todo = [p for p in problems if p not in known]
    seconds, failure = 0.0, ""
    if todo:
        seconds, failure = _tune(todo, output, folder, strategy, device)
        known = recorded(output, target)
    mine = {p: known[p] for p in problems if p in known}
    best = {p: r.config for p, r in mine.items() if r.config.backend == "triton"}
    journal = output.with_name(output.name + ".journal")
    best = {**{p: c for p, c in best_triton(journal).items() if p in mine}, **best}
    wanted = [(p, r.config) for p, r in mine.items()] + list(best.items())
    shares = {p: seconds / len(todo) for p in todo}
    return Tuned(mine, best, shares, compiled(wanted, target, folder), failure)


def recorded(output: Path, target: Target) -> dict[Problem, Record]:
    """Measured records of a results file for one target; none where there is no file."""
    if not output.is_file():
        return {}
    records = [row.record for row in sizes.from_file(output, Defaults()) if row.record]
    return {r.problem: r for r in records if r.target == target.name and r.timer != PREDICTED}


def best_triton(journal: Path) -> dict[Problem, Config]:
    """The fastest Triton config of each problem in a journal; one that reached the final before any that did not."""
    best: dict[Problem, tuple[bool, float, Config]] = {}
    for line in journal.read_text().splitlines() if journal.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "trial" not in entry:
            continue
        trial = Trial.from_json(entry["trial"])
        if trial.status == "ok" and trial.samples and trial.config.backend == "triton":
            problem = Problem.from_json(entry["problem"])
            found = (trial.stage != "final", trial.seconds, trial.config)
            best[problem] = min(best.get(problem, found), found)
    return {problem: config for problem, (_, _, config) in best.items()}


def compiled(
    wanted: Iterable[tuple[Problem, Config]], target: Target, folder: Path
) -> dict[tuple[Problem, Config], Artifact]:
    """Compile configs, in parallel; libraries' own kernels need none."""
    groups: dict[tuple[Problem, str], list[Config]] = {}
    for problem, config in dict.fromkeys(wanted):
        groups.setdefault((problem, config.backend), []).append(config)
    jobs = {}
    for (problem, name), configs in groups.items():
        backend = registry.get(Backend, name)
        if not isinstance(backend, KernelBackend):
            continue
        for config in configs:
            jobs[problem, config] = backend.compile_job(config, problem, target)
    compiler = BuildPool(ArtifactCache(folder / "cache"))
    try:
        built = {b.digest: b for b in compiler.stream(jobs.values())}
    finally:
        compiler.close()
    return {key: replace(built[job.digest], config=key[1]) for key, job in jobs.items()}


def sizes_text(problems: Iterable[Problem]) -> str:
    """A file of sizes for the command line."""
    return "".join(
        f"- {{M: {p.m}, N: {p.n}, K: {p.k}, rowMajorA: {p.layout[0]}, rowMajorB: {p.layout[1]}, "
        f"dtype_a: {p.a.dtype}, dtype_b: {p.b.dtype}, dtype_c: {p.c.dtype}}}\n"
        for p in problems
    )


def _tune(problems: Sequence[Problem], output: Path, folder: Path, strategy: str, device: int) -> tuple[float, str]:
    """Run the command; its seconds, and its last words if it did not end well."""
    listed = folder / "sizes.yaml"
    listed.write_text(sizes_text(problems))
    command = [sys.executable, "-m", "tritongemm.tune", "--gemm-size-file", str(listed), "-o", str(output)]
    command += ["--gpu-ids", str(device)] + (["--strategy", strategy] if strategy else [])
    environment = command_environment(TRITONGEMM_CACHE=str(folder / "cache"))
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.perf_counter() - started
    last = " / ".join(done.stdout.strip().splitlines()[-3:])
    return seconds, f"the tuner ended with {done.returncode}: {last}" if done.returncode else ""
