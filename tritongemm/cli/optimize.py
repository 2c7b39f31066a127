"""The command line of `tritongemm optimize`: from a log of what a job called to kernels that gained."""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tritongemm.campaigns import tables
from tritongemm.campaigns.campaign import Campaign, MeasuringTools
from tritongemm.campaigns.device_load import CountedEvaluator
from tritongemm.campaigns.driver import STAGES, CampaignState, run_campaign
from tritongemm.cli import arguments, options, shell
from tritongemm.core.errors import TargetError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.hip_ext.machine import Machine, count_devices, toolchain
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog, Evaluator, Strategy
from tritongemm.report.console import Reporter
from tritongemm.results.run_files import holding_module_folder
from tritongemm.system.reading import read_bytes
from tritongemm.tune import session
from tritongemm.tune.cluster import Cluster, open_machine
from tritongemm.tune.request import Devices, SearchScope, TuneRequest
from tritongemm.tune.roster import choose_roster
from tritongemm.tune.run import TuningRun

STRATEGY = "genetic"  # as TuningDriver's
THRESHOLD = 0.1  # percent of the time that a product must take, unless the folder has its own
_SUMMARY_COLUMNS = ("config", "problem", "call_count", "us", "baseline", "total (us)", "% of total", "note")


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = _parse(argv)
    request = _read_request(args)
    with (
        Reporter(args.verbose, seconds=request.search.seconds) as reporter,
        open_machine(request, reporter.say) as (machine, cluster),
    ):
        reporter.say(machine.why)
        campaign = _campaign(args, request, machine, cluster, reporter)
        try:
            run_campaign(campaign, args.only or "")
        except KeyboardInterrupt:
            shell.report("stopped; the same command goes on from here")
            raise
        finally:
            if args.log_summary:
                _print_summary(campaign, reporter)
    return shell.WRONG if campaign.failures else shell.DONE


def _read_request(args: argparse.Namespace) -> TuneRequest:
    """Return the request of each run of the campaign; without a cluster all GPUs of this host, or those named."""
    every = 0 if args.gpus or args.ray is not None else count_devices()
    return TuneRequest(
        devices=Devices(args.target, args.gpus, args.ngpus or every, args.ray, args.num_threads),
        search=SearchScope(
            strategy=args.strategy, budget=args.budget, population=args.population or 0, libtype=args.libtype
        ),
        timeout_s=args.timeout,
    )


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser(
        "tritongemm optimize",
        usage="%(prog)s [LOG] [-o DIR] [OPTION ...]",
        epilog="logs: " + "; ".join(log.title for log in registry.every(CallLog)) + "; or a captured workload",
    )
    p.add_argument("log", nargs="?", type=arguments.path, metavar="LOG",
                   help="log of the job's calls; may be omitted to continue an existing campaign")  # fmt: skip
    p.add_argument("-o", "--output", "--output-dir", type=arguments.output_folder, default="tunings", metavar="DIR",
                   help="the campaign's folder (default %(default)s)")  # fmt: skip
    options.add_target(p, "-a", "--architecture")
    p.add_argument("--thr", type=arguments.number(0, 100), metavar="PERCENT",
                   help=f"tune GEMMs that take at least this share of the time (default {THRESHOLD})")  # fmt: skip
    arguments.add_devices(p, "-d", "--devices", default="all")
    p.add_argument("--only", choices=STAGES, help="run only this stage, even if it is done")
    p.add_argument("--with", dest="others", type=arguments.path, action="append", default=[], metavar="RESULTS",
                   help="results of another campaign to merge in the stage merge; may be repeated")  # fmt: skip
    p.add_argument("--no-resume", dest="resume", action="store_false",
                   help="tune again and set the existing results aside")  # fmt: skip
    p.add_argument("--log-summary", action="store_true", help="print the GEMMs with their shares of the job's time")
    strategies = registry.names(Strategy)
    p.add_argument("--strategy", choices=strategies, default=STRATEGY, help="search strategy (default %(default)s)")
    p.add_argument("--population", type=arguments.integer(1, 1_000_000), metavar="N",
                   help="configs per generation, if the strategy has generations (default: its own)")  # fmt: skip
    p.add_argument("--generations", type=arguments.integer(1, 1_000_000), metavar="N",
        help="maximum number of generations (default: the strategy's own)")  # fmt: skip
    p.add_argument("--budget", type=arguments.budget, metavar="N|Ss", help="as of tritongemm tune")
    p.add_argument("--libtype", metavar="B,…", help="as of tritongemm tune")
    arguments.add_compiling(p, "one compile, or of one candidate on the GPU,")
    p.add_argument("--verbose", action="store_true", help="print the outcome of each candidate")
    return p


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options, with the budget that a population and its generations make."""
    p = parser()
    args = p.parse_args(argv)
    if complaint := arguments.complain_of_devices(args):
        p.error(complaint)
    if args.population is None and args.generations is None:
        return args
    own = registry.get(Strategy, args.strategy).population
    if not own:
        p.error(f"--population and --generations need a strategy with generations; {args.strategy} has none")
    if args.budget is not None and args.generations is not None:
        p.error("--generations and --budget exclude each other: both limit the number of configs")
    args.population = args.population or own
    if args.generations is not None:
        args.budget = (args.population * args.generations, 0.0)
    return args


def _campaign(
    args: argparse.Namespace, request: TuneRequest, machine: Machine, cluster: Cluster | None, reporter: Reporter
) -> Campaign:
    protocol = session.make_protocol(request, machine)
    found = CampaignState.read(Path(args.output))
    threshold = THRESHOLD if found is None else found.threshold
    backends = choose_roster(args.libtype, bool(machine.devices), False).backends
    measured_with = {k: str(v) for k, v in asdict(protocol).items()} | toolchain(machine)
    tools = CampaignTools(request, machine, cluster, protocol, backends, reporter)
    return Campaign(
        folder=Path(args.output),
        log=None if args.log is None else Path(args.log),
        threshold=threshold if args.thr is None else args.thr,
        target=machine.target,
        devices=machine.devices,
        say=reporter.say,
        open_evaluators=tools.open_evaluators,
        open_run=tools.open_run,
        open_tools=tools.open_tools,
        measured_with=measured_with | {"compute_units": str(machine.target.compute_units)},
        tune_options=tuple(_tune_words(args)),
        others=tuple(map(Path, args.others)),
        resume=args.resume,
    )


def _tune_words(args: argparse.Namespace) -> list[str]:
    """Return the options of tritongemm tune that tune as this command does, for the scripts of the campaign."""
    words = ["--strategy", args.strategy]
    words += ["--target", args.target] if args.target else []
    words += ["--libtype", args.libtype] if args.libtype else []
    if args.budget is not None:
        configs, seconds = args.budget
        words += ["--budget", f"{seconds:g}s" if seconds else str(configs)]
    words += ["--num-threads", str(args.num_threads)] if args.num_threads else []
    words += ["--timeout", f"{args.timeout:g}"]
    return words if args.ray is None else [*words, "--ray", args.ray, "--ngpus", "1"]


def _print_summary(campaign: Campaign, reporter: Reporter) -> None:
    """Print what takes the job's time, from the campaign's table; nothing before its stage is done."""
    state = CampaignState.read(campaign.folder)
    if state is None or STAGES[0] not in state.done:
        return
    text = read_bytes(campaign.folder / tables.SUMMARY).decode("utf-8", "replace")
    rows = [[row.get(name) or "" for name in _SUMMARY_COLUMNS] for row in csv.DictReader(io.StringIO(text))]
    reporter.table("What takes the time", _SUMMARY_COLUMNS, rows)


@dataclass(frozen=True)
class CampaignTools:
    """Opens what a stage needs, and closes it when the stage is over.

    A stage that met the end of all GPUs of a cluster ends in an UnavailableError, so that it does not count as done:
    the same command goes on with it.
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

    @contextmanager
    def _open_session(self) -> Iterator[session.Session]:
        with session.open_session(self.request, self.machine, self.protocol, self.cluster) as tools:
            yield tools
        self._require_gpus()

    def _require_gpus(self) -> None:
        if self.cluster is not None:
            self.cluster.gpus.require_left()
