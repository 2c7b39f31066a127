"""What a person finds on the screen of a terminal: every row of every table once, and no rest of a line of progress."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import terminal
from tests.support.call_logs import line
from tests.support.tables import heavy

SEARCH = "--target gfx1100 --budget 1 --num_threads 1"
COMMANDS = (
    f"tune --gemm_size_file sizes.yaml {SEARCH} --compare -o first.yaml",
    "tune --gemm_size_file first.yaml --compare_wo_tuning --target gfx1100",
    "tune --gemm_size_file first.yaml --benchmark --target gfx1100",
    f"tune --gemm_size_file sizes.yaml {SEARCH} --compile_only -o second.yaml",
    f"tune --m_range 1-64 -n 16 -k 16 {SEARCH} -o table.yaml",
    "optimize job.log --log_summary --only configs -o campaign -a gfx1100 --num_threads 1",
    "check first.yaml",
)
KEYS = [f"{m}x16x16_fp16_TT" for m in (8, 16, 5)]
LIST = "".join(f"- {{M: {m}, N: 16, K: 16}}\n" for m in (8, 16, 5))
# The line of progress is drawn as often as can be, so that it is there whenever something is printed.
PROGRAM = f"""
import importlib, sys
from tests.support.evaluators import passed
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.report import status_line
OfflineEvaluator._interpret = passed
status_line.PERIOD_SECONDS = 0.001
for command in {COMMANDS!r}:
    name, *words = command.split()
    print("$", name, flush=True)
    importlib.import_module("tritongemm.cli." + name).main(words)
print("$ streams", type(sys.stdout).__name__, type(sys.stderr).__name__)
"""


@pytest.mark.parametrize("columns", [80, heavy(140)])
def test_every_row_is_on_the_screen_once(tmp_path: Path, columns: int) -> None:
    (tmp_path / "sizes.yaml").write_text(LIST)
    (tmp_path / "job.log").write_text("".join(line(m=m, n=16, k=16, count=m) for m in (16, 8, 5)))
    status, lines = terminal.run(["-c", PROGRAM], tmp_path, columns)
    shown = "\n".join(lines)
    assert status == 0, shown
    assert "$ streams TextIOWrapper TextIOWrapper" in lines, "those of the program are back"
    tuned, verified, retimed, compiled, table, summary, checked, _ = (
        text.splitlines() for text in re.split(r"^\$ .*$", shown, flags=re.MULTILINE)[1:]
    )
    for section in (tuned, verified, retimed, compiled, checked):
        first_words = [words[0] for words in map(str.split, section) if words]
        assert [word for word in first_words if word in KEYS] == KEYS, shown
        assert first_words.count("size") == 1, "the head of the table"
    assert sum("Predicted, not measured" in text for text in (*tuned, *retimed)) == 2, shown
    assert "3 of 3 results are right" in verified, shown
    ranges = [tuple(map(int, found.groups())) for text in table if (found := re.match(r" *(\d+) to (\d+) ", text))]
    assert ranges[0][0] == 1 and ranges[-1][1] == 64, shown
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges)), shown
    assert sum(text.startswith("M of N 16, K 16") for text in table) == 1, shown
    assert sum("BBS_TN_" in text for text in summary) == 3 and sum("What takes the time" in t for t in summary) == 1
    assert not re.search(r"\d of \d+ (sizes|tables|results verified|results timed)", shown.replace(" results are", ""))
