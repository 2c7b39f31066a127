"""Opens what the stages of a campaign need: the devices of this host, or those of a Ray cluster's hosts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritongemm.campaigns.campaign import MeasuringTools
from tritongemm.campaigns.device_load import CountedEvaluator
from tritongemm.codegen.modules import candidates_path
from tritongemm.core.errors import TargetError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins.contracts import Evaluator
from tritongemm.report.console import Reporter
from tritongemm.results.run_files import holding_module_folder
from tritongemm.tune import session
from tritongemm.tune.cluster import Cluster
from tritongemm.tune.request import TuneRequest
from tritongemm.tune.run import TuningRun


@dataclass(frozen=True)
class CampaignTools:
    """Opens what a stage needs, and closes it when the stage is over.

    A stage that met the end of all GPUs of a cluster ends in an UnavailableError, so that it does not count as done:
    the same command goes on with it.

    Attributes:
        request: of each run; its sizes and outputs are the campaign's.
        machine: this host, or what a cluster is tuned for.
        cluster: whose GPUs it uses; None for this host's.
        protocol: how times are taken.
        backends: those that take part.
        reporter: notified of the progress.
    """

    request: TuneRequest
    machine: Machine
    cluster: Cluster | None
    protocol: MeasureProtocol
    backends: tuple[str, ...]
    reporter: Reporter

    @contextmanager
    def open_evaluators(self) -> Iterator[Sequence[Evaluator]]:
        """Open what times products on each device, or an offline stand-in."""
        with self._open_session() as tools:
            yield tools.evaluators

    @contextmanager
    def open_tools(self, what: str) -> Iterator[MeasuringTools]:
        """Open what measures with new processes."""
        if not self.machine.devices:
            raise TargetError(
                f"{what} measures, and no GPU driver with a device was found here; copy the folder to a machine that "
                "has the GPU, and run the same command there, or name a Ray cluster whose hosts have it with --ray"
            )
        openers = session.openers(self.request, self.machine, self.protocol, self.cluster)
        with session.open_pool(self.request, self.cluster) as pool:
            yield MeasuringTools(self.machine, openers, pool, self.protocol)
        self._require_gpus()

    @contextmanager
    def open_run(self, problems: Sequence[Problem], output: Path) -> Iterator[TuningRun]:
        """Open a tuning run into a results file; at its end, winners that lack a module get one."""
        with ExitStack() as stack:
            tools = stack.enter_context(self._open_session())
            plan = session.make_options(self.request, self.machine, self.backends, self.protocol, output)
            store = stack.enter_context(
                session.open_store(self.request, self.machine, self.protocol, plan, output, problems)
            )
            stack.enter_context(holding_module_folder(plan.folder, output))
            evaluators = [CountedEvaluator(one) for one in tools.evaluators]
            run = TuningRun(evaluators, tools.pool, store, plan, self.reporter)
            yield run
            session.write_missing_winners(problems, run)
            for problem in problems:
                candidates_path(problem, plan.folder).unlink(missing_ok=True)

    @contextmanager
    def _open_session(self) -> Iterator[session.Session]:
        with session.open_session(self.request, self.machine, self.protocol, self.cluster) as tools:
            yield tools
        self._require_gpus()

    def _require_gpus(self) -> None:
        if self.cluster is not None:
            self.cluster.gpus.require_left()
