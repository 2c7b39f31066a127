import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.nouns import Capsys, Patch, apart, each, refuses
from tests.support.reports import problem, result, write_results
from tritongemm.cli import compare_server, shell
from tritongemm.core.trial import PREDICTED
from tritongemm.results.server_comparison import ComparedLoad, Quantity, compare_answers, read_comparison

QUICK = ("--batches", "2", "--prefill", "0", "--answer", "8", "--prompt", "4", "--passes", "1", "--start-limit", "30")


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """The command's words for a toy server, of which no process is left at the end."""
    table = write_results(tmp_path / "tuned.yaml", [result(problem(2), 1e-6), result(problem(2, 512), 1e-6)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    yield ["--table", str(table), "-o", str(tmp_path / "out.json"), "--logs", str(tmp_path / "logs"), *QUICK, "--",
           sys.executable, "-m", "tests.support.toy_server", "--port", port]  # fmt: skip
    deadline = time.monotonic() + 10
    while left := [pid for pid in processes(tmp_path / "logs") if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.01)


def processes(logs: Path) -> list[int]:
    """The servers of some logs, and the children of other sessions, which the operating system does not kill."""
    lines = [line for log in logs.glob("*.log") for line in log.read_text().splitlines()]
    return [int(pid) for line in lines if line.startswith("processes ") for pid in line.split()[1:]]


def runs(pid: int) -> bool:
    try:
        return re.search(r"\) (.)", Path(f"/proc/{pid}/stat").read_text())[1] not in "ZX"  # type: ignore[index]
    except OSError:
        return False


def test_a_table_that_gains(words: list[str], tmp_path: Path, capsys: Capsys) -> None:
    assert compare_server.main(words) == shell.DONE
    said = capsys.readouterr()
    assert "2 of 3 rows serve cuda:0 (sm90); 1 for gfx942\ntuned kernels serve 4 of 5 linear layers of Toy" in said.out
    assert "about " in said.err
    row = re.search(r"^batch 2 +step ms +(\S+) +(\S+) +\S+% +(\S+) .* (\S+)$", said.out, re.MULTILINE)
    assert row and float(row[1]) > float(row[2]) and float(row[3]) > 1.2 and row[4] == "1.250"
    assert "A against A: 20 of 20 answers are the same, 100.0%" in said.out
    assert "A against B: 0 of 40 answers are the same, 7.8% of the tokens" in said.out
    read = read_comparison(tmp_path / "out.json", (tmp_path / "out.json").read_text())
    assert read.model == "toy" and read.loads[0].quantities[0].name == "step_ms"
    assert read.agreement["A against A"].equal == 20
    assert [len(starts) for starts in read.start_s.values()] == [2, 2]
    assert len(processes(tmp_path / "logs")) == 8, "four servers with a child each"


@apart(
    ("start", "  | no such model\nerror: the server ended with exit status 1 before it answered"),
    ("answer", "an illegal memory access\nerror: the server ended with exit status 3 while it was measured"),
    ("refuse", "error: the server answered /v1/completions with status 400: {"),
    ("page", "error: the server's answer is not one of OpenAI's HTTP API: JSONDecodeError("),
    ("no model", "error: the server's answer is not one of OpenAI's HTTP API: KeyError('data')"),
    ("silent", "/health within 0.5 s; --start-limit"),
)
def test_a_server_fails(fault: str, reported: str, /, words: list[str], capsys: Capsys, monkeypatch: Patch) -> None:
    if fault in ("refuse", "page", "no model"):  # it runs on
        monkeypatch.setattr(compare_server, "ENDING_SECONDS", 0.1)
    if fault == "silent":
        words[words.index("--start-limit") + 1] = "0.5"
    assert compare_server.main([*words, "--fault", fault]) == shell.REFUSED and reported in capsys.readouterr().err


def test_what_cannot_be_started(words: list[str], tmp_path: Path, capsys: Capsys) -> None:
    own = words[: words.index("--")]
    with socket.create_server(("127.0.0.1", int(words[-1]))):
        assert compare_server.main(words) == shell.REFUSED
    assert f"http://127.0.0.1:{words[-1]} is in use already" in capsys.readouterr().err
    assert compare_server.main([*own, "--", "no-such-server"]) == shell.REFUSED
    assert "the server's port is not known" in capsys.readouterr().err
    assert compare_server.main([*own, "--", "no-such-server", *words[-2:]]) == shell.REFUSED
    assert "no-such-server can't be started: No such file" in capsys.readouterr().err
    assert compare_server.main(own) == shell.REFUSED and "there is no server to start" in capsys.readouterr().err
    assert compare_server.main([*words[:-1], "99999"]) == shell.REFUSED
    assert "the server's --port: '99999' is not a whole number from 1 to 65535" in capsys.readouterr().err
    (tmp_path / "out.json").write_text("a letter")
    assert compare_server.main(words) == shell.REFUSED
    assert "out.json is not a comparison of a server" in capsys.readouterr().err
    write_results(Path(own[own.index("--table") + 1]), [result(problem(16), 1e-5, timer=PREDICTED)])
    assert compare_server.main(words) == shell.REFUSED
    assert "predictions, which serve no call" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "log"), [(signal.SIGINT, "A2.log"), (signal.SIGTERM, "A1.log")])
def test_a_signal_ends_the_server(words: list[str], tmp_path: Path, capsys: Capsys, number: int, log: str) -> None:
    def stop() -> None:
        while not (tmp_path / "logs" / log).is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    before = signal.signal(number, signal.default_int_handler)  # a job in the background ignores Ctrl-C
    thread.start()
    try:
        assert compare_server.main(words) == shell.INTERRUPTED
    finally:
        signal.signal(number, before)
    thread.join()
    assert ("Greedy tokens, A against B" in capsys.readouterr().out) == (log == "A2.log")


def test_a_killed_command_leaves_no_server(words: list[str], tmp_path: Path) -> None:
    """The operating system ends the server's group; its child of another session has its own parent to watch."""
    process = subprocess.Popen([sys.executable, "-m", "tritongemm", "compare-server", *words], cwd=ROOT)
    while not processes(tmp_path / "logs"):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    os.kill(processes(tmp_path / "logs")[1], signal.SIGKILL)


@apart(
    (None, "python -m sglang.launch_server --model-path m", 30000), (None, "/usr/bin/vllm serve m", 8000),
    (None, "vllm serve m --port=81", 81), (82, "sglang serve m --port 81", 82),
)  # fmt: skip
def test_where_a_server_answers(named: int | None, command: str, port: int, /) -> None:
    assert compare_server._port(named, command.split()) == port


def test_gains_noise_and_agreement() -> None:
    step, rate = Quantity("step_ms", [2.0, 2.02], [1.9, 1.91]), Quantity("tokens_per_s", [100.0, 110.0], [105.0, 112.0])
    assert step.gain == pytest.approx((1.0552, 2.0 / 1.91, 2.02 / 1.9), abs=1e-3) and step.is_sure
    assert not Quantity("step_ms", step.without, [1.9, 1.96]).is_sure, "each pair gains, but starts differ"
    assert rate.noise == pytest.approx(10 / 105) and not rate.is_sure and rate.gain.least < 1 < rate.gain.most
    once = Quantity("step_ms", [2.0], [1.0])
    assert once.noise is None and not once.is_sure
    assert compare_server._cells(ComparedLoad("batch 1", 1, (once,), None), 0)[-2] == "one start each"
    differing = (["a", "b", "c"], [-1.0, -1.5, -2.0]), (["a", "x", "c"], [-1.25, -9.0, -9.0])
    found = compare_answers([differing, ((["a"], []), (["a"], []))])
    assert (found.answers, found.equal, found.share, found.logprob) == (2, 1, 0.5, 0.25)


@each("damage", [
    lambda data: data.pop("loads"), lambda data: data.update(kind="x"), lambda data: data.update(loads=[{"name": 3}]),
    lambda data: data["loads"][0]["quantities"]["step_ms"].update(without=[float("nan")]),
    lambda data: data["loads"][0]["quantities"]["step_ms"].update({"with": []}),
    lambda data: data["agreement"].update(x={"answers": -1}),
])  # fmt: skip
def test_a_damaged_comparison_is_refused(damage: object) -> None:
    quantities = {key: {"without": [2.0], "with": [1.0]} for key in ("step_ms", "tpot_ms", "ttft_ms", "tokens_per_s")}
    data = {"kind": "comparison of a server", "command": [], "table": "t", "model": "m", "served": [],
            "agreement": {}, "start_s": {},
            "loads": [{"name": "batch 1", "m": 1, "predicted": None, "quantities": quantities}]}  # fmt: skip
    assert read_comparison(Path("c.json"), json.dumps(data)).loads[0].quantities[0].gain.ratio == 2
    damage(data)  # type: ignore[operator]
    refuses(r"c\.json: ", read_comparison, Path("c.json"), json.dumps(data))
