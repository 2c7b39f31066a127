"""A race without a GPU: backends made of text, and a run with them and the stand-in for an evaluator."""

import io
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import ArtifactCache, BuildPool, KernelBackend, Problem, TritonGemmError, registry, settings
from tests.support.stores import take
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun

SIZE = Problem(16, 16, 32)
Drop = Callable[[str, str], None]  # puts a backend of a name and a text beside those that are there

TOY = """
from tests.support.toys.backend_toy import ToyBackend
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.support import Support


class Toy(ToyBackend):
"""
CODE = (
    TOY
    + """
    compile_limit_s = 100.0

    def _candidates(self, problem, target, inputs, everything):
        return [Config("toy", n, n, n, backend=self.name) for n in (1, 2, 3)]

    def _compile_job(self, config, problem, target, inputs):
        if config.block_m == 2:
            raise InputError("two is no number for a tile")
        return super()._compile_job(config, problem, target, inputs)

    def _compile(self, job):
        if job.config.block_m == 3:
            raise InputError("three is truncated")
        return super()._compile(job)
"""
)


def built_at_once(job: CompileJob) -> Artifact:
    """The artifact of a kernel of Triton's without tensor maps, which is launched as a compiled one and has no code."""
    offsets = [8 * i for i in range(len(job.identity["signature"]) + 2)]  # and two for Triton's own scratch memory
    launch = {"dynamic_shared": 0, "offsets": offsets}
    return Artifact(job.config, job.digest, "k.hsaco", symbol=job.config.kernel_name, threads=64, launch=launch)


@contextmanager
def pool_and_store(folder: Path, build: Callable[[CompileJob], Artifact] = built_at_once) -> Iterator[Any]:
    """A pool of compilers that does what a function does, and the store of an output in a folder."""
    with closing(BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)) as pool, take(folder / "out.yaml") as store:
        pool.build = build  # type: ignore[assignment, method-assign]
        yield pool, store


def race(
    folder: Path,
    backends: tuple[str, ...],
    evaluator: FakeEvaluator | None = None,
    build: Callable[[CompileJob], None] = lambda job: None,
    **plan: Any,
) -> tuple[Any, Store, str]:
    """A run's failures, its store and what it said; `build` is called before a toy is built, `plan` goes to `Plan`."""
    compiler, evaluator = BuildPool(ArtifactCache(settings.cache_folder()), jobs=1), evaluator or FakeEvaluator()
    others = compiler.build

    def built(job: CompileJob) -> Artifact:
        """Toys are built here: no other process finds them."""
        if not job.config.backend.startswith("toy"):
            return built_at_once(job) if job.config.backend == "triton" else others(job)
        build(job)
        try:
            one: Artifact = registry.get(KernelBackend, job.config.backend).compile(job)[0]
            return one
        except TritonGemmError as error:
            return Artifact(job.config, job.digest, status="compile_failed", reason=str(error))

    compiler.build = built  # type: ignore[method-assign]
    opened = Store.open(folder / "out.yaml", evaluator.target.name, {}, {})
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out), opened as store, closing(compiler):
        what = TuningOptions(
            folder, **{"strategy": "exhaustive", "budget": 1, "library": "", "backends": backends, **plan}
        )
        failures = TuningRun([evaluator], compiler, store, what, Reporter(verbose=True)).tune([SIZE])
        store.merge()
    return failures, store, out.getvalue()
