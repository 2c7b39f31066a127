"""Records → launches: what each record names is compiled where the cache lacks it, and made a launch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record

if TYPE_CHECKING:
    from tritongemm.build.cache import ArtifactCache
    from tritongemm.core.artifact import Artifact
    from tritongemm.core.target import Target


def launches(
    records: Sequence[Record], target: Target, cache: ArtifactCache
) -> dict[Problem, Launch | HostLaunch | str]:
    """The launch of each record's config, compiled in parallel where the cache lacks it; or why there is none.

    Args:
        records: one for each problem, tuned for the target.
        target: facts of the live device; its compute units size persistent grids.
        cache: compiled kernels.
    """
    from tritongemm.build.pool import BuildPool
    from tritongemm.codegen import modules, template_facts
    from tritongemm.plugins import _modules as registry

    found: dict[Problem, Launch | HostLaunch | str] = {}
    waiting: dict[Problem, Any] = {}

    def finish(record: Record, built: Artifact) -> None:
        # Configs that differ in their arguments alone share a binary.
        mine, problem = replace(built, config=record.config), record.problem
        try:
            ok = built.status == "ok"
            backend = registry.load("backends", record.config.backend)
            found[problem] = backend.launch(mine, problem, target) if ok else f"{built.status}: {built.reason}"
        except TritonGemmError as error:
            found[problem] = str(error)

    with tempfile.TemporaryDirectory(prefix="tritongemm-") as folder:
        for record in records:
            problem, config = record.problem, record.config
            try:
                backend = registry.load("backends", config.backend)
                generated = config.backend == "triton"
                if generated:
                    template_facts.kernel_template(
                        config.template
                    )  # the record may be older or newer than the templates
                job = backend.job(config, problem, target, "")
                built = cache.get(job.digest)
                if built is None:
                    # A file for each problem: modules of equal sizes but other layouts differ in name already.
                    module = modules.write_candidates(problem, [config], target, Path(folder)) if generated else ""
                    waiting[problem] = record, backend.job(config, problem, target, str(module))
                else:
                    finish(record, built)
            except (TritonGemmError, OSError) as error:
                found[problem] = str(error)
        if waiting:
            compiler = BuildPool(cache, min(len(os.sched_getaffinity(0)), len(waiting)))
            try:
                by_digest = {built.digest: built for built in compiler.stream(job for _, job in waiting.values())}
            finally:
                compiler.close()
            for record, job in waiting.values():
                finish(record, by_digest[job.digest])
    return found
