import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import DATA, libraries, shipped
from tests.support.nouns import Capsys, Defaults, InputError, Patch, cases, results_format
from tests.support.reports import problem, result, table, write_results, write_run
from tritongemm.cli import report, result_files
from tritongemm.hip_ext import machine
from tritongemm.results.server_comparison import QUANTITIES, ComparedLoad, Quantity, ServerComparison

drawn = pytest.mark.skipif(
    find_spec("plotly") is None, reason="plotly is not installed: pip install 'tritongemm[report]'"
)
REAL = DATA / "h200_fp8_journal.jsonl"


@drawn
def test_results_and_the_journal_beside_them_also_through_a_link_and_a_pipe(tmp_path: Path, capsys: Capsys) -> None:
    run, output = write_run(tmp_path / "out.yaml", table(512, 512), "too slow"), tmp_path / "report.html"
    assert report.main([str(run), "-o", str(output)]) == 0
    said = capsys.readouterr()
    assert "out.yaml.journal: 99% of the final speed after " in said.out and "4 results" in said.out and not said.err
    page = output.read_text(encoding="utf-8")
    assert "Not drawn" not in page.split('id="drawn"')[0] and "too slow" in page
    assert report.main([str(run), "-o", str(output), "--title", "Again"]) == 0, "a report is replaced"
    assert "<h1>Again</h1>" in output.read_text(encoding="utf-8")
    link, pipe = tmp_path / "link.yaml", tmp_path / "pipe"
    link.symlink_to(run)
    assert report.main([str(link), "-o", str(output)]) == 0
    assert "of the final speed" in capsys.readouterr().out, "the journal of what the link leads to is read"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'cat "$0" > "$1"', str(run), str(pipe)]):
        assert report.main([str(pipe), "-o", str(output)]) == 0
    assert "4 results" in capsys.readouterr().out


@drawn
def test_a_journal_alone_and_the_faster_of_two_results_are_shown(tmp_path: Path, capsys: Capsys) -> None:
    assert report.main([str(REAL), "-o", str(tmp_path / "report.html")]) == 0
    assert "5 results" in capsys.readouterr().out
    one = write_results(tmp_path / "one.yaml", [result(problem(16), 2e-6)])
    two = write_results(tmp_path / "two.yaml", [result(problem(16), 1e-6)])
    assert report.main([str(one), str(two), "-o", str(tmp_path / "report.html")]) == 0
    assert "1 results" in capsys.readouterr().out
    assert '<td class="number" data-order="1.0">1.00</td>' in (tmp_path / "report.html").read_text(encoding="utf-8")


@drawn
def test_a_workload_weighs(tmp_path: Path, capsys: Capsys) -> None:
    results = write_results(tmp_path / "out.yaml", [result(problem(16), 1e-6), result(problem(32), 1e-6)])
    workload = tmp_path / "calls.yaml"
    row = "- {M: %d, N: 4096, K: 4096, rowMajorB: N, dtype_a: bf16, dtype_b: bf16, dtype_c: bf16, count: %d}\n"
    workload.write_text(row % (16, 7) + row % (48, 9), encoding="utf-8")
    output = tmp_path / "report.html"
    assert report.main([str(results), "-o", str(output), "--workload", str(workload)]) == 0
    assert "1 of 2 sizes, 79.4% of the operations, have no result" in capsys.readouterr().err
    assert "weighed by the workload&#39;s calls" in output.read_text(encoding="utf-8")
    workload.write_text(row % (48, 9), encoding="utf-8")
    assert report.main([str(results), "-o", str(output), "--workload", str(workload)]) == 2
    assert "none of its sizes has a result" in capsys.readouterr().err


@drawn
def test_older_results_and_a_server(tmp_path: Path, capsys: Capsys) -> None:
    new = write_results(tmp_path / "new.yaml", [result(problem(16), 1e-6)])
    old = write_results(tmp_path / "old.yaml", [result(problem(16), 2e-6)])
    words, server = [str(new), "-o", str(tmp_path / "report.html"), "--against", str(old)], tmp_path / "server.json"
    assert report.main(words) == 0
    assert "1 faster, 0 slower, 0 alike, 0 new, 0 gone; all calls of sizes in both" in capsys.readouterr().out
    server.write_text("{}", encoding="utf-8")
    assert report.main([*words, "--server", str(server)]) == 2
    assert "server.json: it is not JSON that tritongemm compare-server -o wrote" in capsys.readouterr().err
    quantities = tuple(Quantity(name, [2.0], [1.0]) for name in QUANTITIES)
    compared = ServerComparison([], "new.yaml", "model", (ComparedLoad("batch 1", 1, quantities),))
    server.write_text(compared.to_json(), encoding="utf-8")
    assert report.main([*words, "--server", str(server)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>2.000</b> step, batch 1" in page and "Against older results" in page


def test_shipped_tables_are_those_of_this_memory(tmp_path: Path, monkeypatch: Patch) -> None:
    shipped.ship(tmp_path, monkeypatch)
    found = result_files.ReadFiles()
    monkeypatch.setattr(machine, "memory_gbps", lambda _: 4800)
    result_files.read(Path("shipped"), Defaults(), found)
    assert found.records
    monkeypatch.setattr(machine, "memory_gbps", lambda _: 100)
    with pytest.raises(InputError, match="no GPU is here that has shipped tables; there are: h100, h200"):
        result_files.read(Path("shipped"), Defaults(), found)
    named = result_files.ReadFiles()
    result_files.read_shipped("H200", named)
    assert named.records == found.records, "no GPU of that kind needs to be here"


@drawn
def test_a_campaign_weighs_by_its_log(tmp_path: Path, capsys: Capsys) -> None:
    folder, output = tmp_path / "tunings", tmp_path / "report.html"
    folder.mkdir()
    (folder / "campaign.json").write_text("{}", encoding="utf-8")
    assert report.main([str(folder), "-o", str(output)]) == 2
    assert "this campaign has no results yet" in capsys.readouterr().err
    tuned = table(512, 512)
    write_run(folder / "tuned.yaml", tuned, "too slow")
    write_results(folder / "merged.yaml", tuned[:3])
    counts = [f"{row.problem.key},{3 + place}" for place, row in enumerate(tuned[:2])]
    (folder / "gemms.csv").write_text("\n".join(["problem,call_count", *counts, ""]), encoding="utf-8")
    assert report.main([str(folder), "-o", str(output)]) == 0
    assert "tuned.yaml.journal: 99% of the final speed" in capsys.readouterr().out
    assert "weighed by the workload&#39;s calls" in output.read_text(encoding="utf-8")


@drawn
def test_a_library_is_shown(tmp_path: Path, capsys: Capsys) -> None:
    libraries.write(tmp_path / "kernels.zip", *[libraries.tuned(libraries.linear(m, 48, 64)) for m in (8, 16)])
    assert report.main([str(tmp_path / "kernels.zip"), "-o", str(tmp_path / "report.html")]) == 0
    assert "2 results" in capsys.readouterr().out


@drawn
def test_of_too_many_results_those_that_take_time_are_shown(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr(result_files, "MOST_RECORDS", 2)
    path = write_results(tmp_path / "out.yaml", [result(problem(m), m * 1e-6) for m in (1, 3, 2)])
    assert report.main([str(path), "-o", str(tmp_path / "report.html")]) == 0
    said = capsys.readouterr()
    assert "Of 3 results the 2 that take most time are shown." in said.err and "2 results" in said.out
    assert "<td>1x4096x4096_bf16_TN</td>" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@drawn
def test_damaged_rows_and_lines_cost_themselves(tmp_path: Path, capsys: Capsys) -> None:
    run = write_run(tmp_path / "out.yaml", table(512, 512), "too slow")
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join([lines[0], lines[1].replace('"time(us)": ', '"time(us)": -'), *lines[2:]]), encoding="utf-8")
    beside = tmp_path / "out.yaml.journal"
    beside.write_bytes(beside.read_bytes().replace(b"too slow", b"too long", 1))
    assert report.main([str(run), "-o", str(tmp_path / "report.html")]) == 1
    said = capsys.readouterr().err
    assert "Left out: " in said and "row 1" in said and "1 lines can't be read" in said


@cases(
    ("", "is empty"),
    ("hello", ""),
    (results_format().write([]), ""),
    ("- {M: 1, N: 1, K: 1}\n", "no result with a time (FILE: sizes alone in 1 row)"),
)
def test_what_holds_no_results_is_refused(text: str, words: str, /, tmp_path: Path, capsys: Capsys) -> None:
    path, output = tmp_path / "out.yaml", tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    assert report.main([str(path), "-o", str(output)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and words.replace("FILE", str(path)) in said
    assert not output.exists()


def test_another_file_is_not_replaced(tmp_path: Path, capsys: Capsys) -> None:
    output = tmp_path / "report.html"
    output.write_text("<!doctype html>\n<p>mine", encoding="utf-8")
    assert report.main([str(REAL), "-o", str(output)]) == 2
    assert "is not a report of tritongemm" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "<!doctype html>\n<p>mine"
    assert report.main([str(tmp_path / "absent.yaml"), "-o", str(tmp_path / "new.html")]) == 2
    assert not (tmp_path / "new.html").exists()


def test_without_plotly_it_says_what_to_install(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    assert report.main([str(REAL), "-o", str(tmp_path / "report.html")]) == 2
    assert "pip install 'tritongemm[report]'" in capsys.readouterr().err and not (tmp_path / "report.html").exists()
