"""The command line of `tritongemm compare-server`: what a table gains in the user's own server, over HTTP."""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tritongemm.cli import arguments, result_files, shell
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.formats import Defaults
from tritongemm.measure.server import loads
from tritongemm.measure.server.client import Client, Continuation
from tritongemm.measure.server.loads import Load
from tritongemm.measure.server.process import Server, run
from tritongemm.report.page.report_data import ReportData
from tritongemm.results import server_comparison
from tritongemm.results.server_comparison import QUANTITIES, ComparedLoad, Quantity, ServerComparison
from tritongemm.serving import shipped_tables
from tritongemm.system import files, settings
from tritongemm.system.temporary_folder import TemporaryFolder

ENDING_SECONDS = 1.0  # that a server which closes its connections may take to end

_COLUMNS = ("load", "quantity", "A", "B", "A to A", "gain", "of all pairs", "", "rows")
_WORDS = ("load", "quantity", "of all pairs", "")
_LAST_LINES = 15  # of the log of a server that failed
_WARM_UP = 1 << 20  # seed of prompts that are sent first
_a_port = arguments.integer(1, 65535)
_USUAL_PORTS = {"vllm": 8000, "sglang": 30000}  # of servers whose command names none


@dataclass
class _Start:
    """What one start of a server measured."""

    model: str = ""  # that it serves
    medians: dict[str, dict[str, float]] = field(default_factory=dict)  # of the passes, by load and quantity
    answers: list[Continuation] = field(default_factory=list)  # greedy ones
    served: list[str] = field(default_factory=list)  # what the log says about rows that serve
    start_s: float = 0.0  # seconds until it answered


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is `WRONG` of `cli.shell` where the server's log names no row that serves."""
    args = parser().parse_args(argv)
    server = args.server[args.server[:1] == ["--"] :]
    if not server:
        raise InputError("there is no server to start: write its command behind --, such as -- vllm serve MODEL")
    rows = _read_rows(args)
    if args.output:
        files.check_place(Path(args.output), server_comparison.is_comparison, "a comparison of a server", files.ADVICE)
    sent = [loads.decoding(batch, args.prompt, args.answer) for batch in args.batches if batch]
    sent += [loads.prefilling(length) for length in args.prefill if length]
    starts: dict[str, list[_Start]] = {"A": [], "B": []}
    try:
        with TemporaryFolder() as folder:
            _alternate(args, server, sent, Path(args.logs or folder), starts)
    finally:  # what ends the command early does not cost what was measured
        served = bool(starts["B"]) and _show(args, _compared(args, server, sent, starts, rows), bool(rows.calls))
    return shell.DONE if served else shell.WRONG


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm compare-server", usage="%(prog)s --table FILE [OPTION ...] -- SERVER ...")
    p.add_argument("server", nargs=argparse.REMAINDER, metavar="SERVER",
                   help="the command that starts the server, behind --; it has --port")  # fmt: skip
    p.add_argument("--table", type=arguments.path, required=True, metavar="FILE",
                   help="the results that B serves, or shipped, as in TRITONGEMM_CONFIG; A serves none")  # fmt: skip
    p.add_argument("-o", "--output", type=arguments.output_file, metavar="FILE",
                   help="write all values as JSON, for tritongemm report --server")  # fmt: skip
    p.add_argument("--workload", type=arguments.path, metavar="FILE",
                   help="sizes with call counts, which weigh the rows' gain (default: each product once)")  # fmt: skip
    g = p.add_argument_group("requests")
    g.add_argument("--batches", type=_sizes, default=_sizes("1,16,64"), metavar="N,…",
                   help="requests at once, a load each; 0 for none (1,16,64)")  # fmt: skip
    g.add_argument("--prompt", type=arguments.size, default=128, metavar="N", help="tokens of a prompt (%(default)s)")
    g.add_argument("--answer", type=arguments.integer(2, arguments.LARGEST_SIZE), default=128, metavar="N",
                   help="tokens of an answer (%(default)s)")  # fmt: skip
    g.add_argument("--prefill", type=_sizes, default=_sizes("512,2048"), metavar="N,…",
                   help="tokens of long prompts, sent one by one, a load each; 0 for none (512,2048)")  # fmt: skip
    g.add_argument("--passes", type=arguments.integer(1, 100), default=3, metavar="N",
                   help="how often each load is sent after it warmed up (%(default)s)")  # fmt: skip
    g = p.add_argument_group("the server")
    g.add_argument("--rounds", type=arguments.integer(1, 20), default=2, metavar="N",
                   help="starts without and with the table, in turn (%(default)s)")  # fmt: skip
    g.add_argument("--port", type=_a_port, metavar="N",
                   help="where it answers, if its command has no --port (vLLM: 8000, SGLang: 30000)")  # fmt: skip
    g.add_argument("--start-limit", type=arguments.seconds, default=1200.0, metavar="S",
                   help="seconds that a start may take (%(default)g)")  # fmt: skip
    g.add_argument("--answer-limit", type=arguments.seconds, default=300.0, metavar="S",
                   help="seconds that one answer may take (%(default)g)")  # fmt: skip
    g.add_argument("--logs", type=arguments.output_folder, metavar="DIR", help="keep what the servers print here")
    return p


def _sizes(text: str) -> list[int]:
    """Return the numbers of a list with commas between."""
    return [arguments.integer(0, arguments.LARGEST_SIZE)(word) for word in text.split(",")]


def _read_rows(args: argparse.Namespace) -> ReportData:
    """Return the rows of the table, with the calls of the workload."""
    found, defaults = result_files.ReadFiles(), Defaults()
    for path in args.table.split(os.pathsep):
        result_files.read(Path(path), defaults, found)
    if not found.records:
        raise InputError(f"{args.table}: no result with a time; name results of tritongemm tune")
    if all(record.predicted for record in found.records.values()):
        raise InputError(f"{args.table}: its rows are predictions, which serve no call; tune on the server's GPU")
    calls = result_files.calls_of(args.workload, defaults, found)
    return ReportData(tuple(found.records.values()), calls=calls)


def _alternate(
    args: argparse.Namespace, server: Sequence[str], sent: Sequence[Load], logs: Path, starts: dict[str, list[_Start]]
) -> None:
    """Start the server without and with the table in turn, each time alone on the machine, and measure it."""
    port = _port(args.port, server)
    shell.report(
        f"A: {' '.join(server)}; B: the same with {args.table}. Starts of each, in turn: {args.rounds}; the "
        "first often takes two minutes, a later one a minute, and the requests of each another."
    )
    logs.mkdir(parents=True, exist_ok=True)
    named = args.table.split(os.pathsep)
    table = os.pathsep.join(path if path == shipped_tables.NAME else os.path.abspath(path) for path in named)
    order = [f"{name}{1 + place}" for place in range(args.rounds) for name in "AB"]
    begin = time.monotonic()
    for done, label in enumerate(order, start=1):
        environment = settings.for_server(table if label[0] == "B" else "")
        client = Client(_host(server), port, _value_of("--api-key", server), args.answer_limit)
        found = _measure(Server(server, environment, logs / f"{label}.log", client), sent, args)
        starts[label[0]].append(found)
        left = (time.monotonic() - begin) / done * (len(order) - done)
        times = ", ".join(f"{values['tpot_ms']:.2f} ms at {name}" for name, values in found.medians.items())
        said = [f"{label}: TPOT {times}", *found.served, *([f"about {left:.0f} s are left"] if left else [])]
        shell.report("; ".join(said))


def _measure(server: Server, sent: Sequence[Load], args: argparse.Namespace) -> _Start:
    """Start a server, measure it and end it, whatever happens."""
    found = _Start()
    try:
        server.start()
        found.start_s = server.wait(args.start_limit)
        shell.report(f"{server.log.stem}: answers after {found.start_s:.0f} s")
        try:
            run(_send_all(server.client, sent, args.passes, found))
        except UnavailableError:
            server.require_running("while it was measured", grace_s=ENDING_SECONDS)
            raise
        found.served = server.served()
        return found
    except UnavailableError:
        for line in server.last_lines(_LAST_LINES):
            shell.report(f"  | {line}")
        raise
    finally:
        server.stop()


async def _send_all(client: Client, sent: Sequence[Load], passes: int, found: _Start) -> None:
    found.model = await client.find_model()
    for load in sent:
        await loads.send(client, load, _WARM_UP)
        measured = [await loads.send(client, load, seed) for seed in range(passes)]
        found.medians[load.name] = {name: median(one[name] for one in measured) for name in QUANTITIES}
    found.answers = await loads.continue_greedily(client)


def _compared(
    args: argparse.Namespace,
    server: Sequence[str],
    sent: Sequence[Load],
    starts: dict[str, list[_Start]],
    rows: ReportData,
) -> ServerComparison:
    a, b = starts["A"], starts["B"]
    compared, gains = [], rows.predicted_gains(load.m for load in sent)
    for load in sent:
        values = {name: [[start.medians[load.name][name] for start in each] for each in (a, b)] for name in QUANTITIES}
        quantities = tuple(Quantity(name, *both) for name, both in values.items())
        compared.append(ComparedLoad(load.name, load.m, quantities, gains.get(load.m)))
    agreement = server_comparison.agreements([start.answers for start in a], [start.answers for start in b])
    served = list(dict.fromkeys(line for start in b for line in start.served))
    start_s = {name: [start.start_s for start in each] for name, each in starts.items()}
    return ServerComparison(server, args.table, a[0].model, tuple(compared), agreement, served, start_s)


def _show(args: argparse.Namespace, comparison: ServerComparison, weighed: bool) -> bool:
    """Print a comparison, and write it; return whether rows served."""
    rows = [_cells(load, place) for load in comparison.loads for place in range(len(load.quantities))]
    shell.answer_table(_COLUMNS, rows, _WORDS)
    for line in _lines(comparison, weighed):
        shell.answer(line)
    if args.output:
        files.atomic_write(Path(args.output), comparison.to_json())
    return bool(comparison.served)


def _lines(comparison: ServerComparison, weighed: bool) -> Iterator[str]:
    """Yield what the figures rest on."""
    how = "weighed by the workload's calls" if weighed else "each counted once, as no workload was named"
    yield "A: without the table, B: with it. Gain: how much faster B is, by the median of all pairs of starts."
    yield f"Rows: the gain that the table's own times predict for the products alone, {how}."
    for name, agreement in comparison.agreement.items():
        yield f"Greedy tokens, {name}: {agreement}"
    if not comparison.agreement:
        yield "Greedy tokens: the server returned none"
    for name, seconds in comparison.start_s.items():
        yield f"Starts of {name} until it answered: {', '.join(f'{value:.0f}' for value in seconds)} s"
    yield from comparison.served or [
        "The log of B does not say what was served: is tritongemm installed in the server's environment, and does the "
        "server log lines of level info? (--logs)"
    ]


def _cells(load: ComparedLoad, place: int) -> list[str]:
    one = load.quantities[place]
    ratio, least, most = one.gain
    form = ".0f" if one.name in server_comparison.RATES else ".3f"
    return [
        "" if place else load.name, QUANTITIES[one.name], format(median(one.without), form),
        format(median(one.served), form), "-" if one.noise is None else f"{one.noise:.1%}", f"{ratio:.3f}",
        f"{least:.3f} to {most:.3f}",
        "" if one.is_sure else "one start each" if one.noise is None else "within noise",
        f"{load.predicted:.3f}" if load.predicted and not place else "",
    ]  # fmt: skip


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return the value of an option in a server's command; "" where it has none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == option:
            return value or following
    return ""


def _host(server: Sequence[str]) -> str:
    host = _value_of("--host", server)
    return "127.0.0.1" if host in ("", "0.0.0.0", "::", "localhost") else host


def _port(named: int | None, server: Sequence[str]) -> int:
    """Return the port that is named, that of the server's command, or else the usual one of such a server."""
    own = _value_of("--port", server)
    programs = {Path(word).name.partition(".")[0] for word in server}
    usual = next((port for name, port in _USUAL_PORTS.items() if name in programs), 0)
    if own and not named:
        try:
            return _a_port(own)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"the server's --port: {error}") from None
    if not named and not usual:
        raise InputError("the server's port is not known: give its command --port N, or name it before the --")
    return named or usual
