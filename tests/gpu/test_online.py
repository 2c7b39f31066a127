import os
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.here import needs_gpu
from tests.support import ROOT
from tritongemm.serving.online import CSV_FILE, CSV_HEADER, FILE

pytestmark = needs_gpu

PROGRAM = """
import sys, time, torch, tritongemm
from tritongemm.serving import online_race
tried = []
hold = online_race.AlgorithmRace.hold
online_race.AlgorithmRace.hold = lambda race, seconds: (tried.append(race.problem.key), hold(race, seconds))[1]
torch.manual_seed(0)
with torch.no_grad():
    graph, results = torch.cuda.CUDAGraph(), []
    for m, n, k, bias in ((1, 4096, 4096, False), (16, 6144, 4096, False), (64, 2112, 7168, True)):
        x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        b = torch.randn(n, device="cuda").bfloat16() if bias else None
        y = tritongemm.mm(x, w, b)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, w, b), rtol=2e-2, atol=2e-1)
        print(tritongemm.explain(x, w, b).splitlines()[0])
        results.append((x, w, b))
    new = torch.randn(7, 4096, device="cuda").bfloat16(), torch.randn(1024, 4096, device="cuda").bfloat16()
    torch.nn.functional.linear(*new)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # what was tried serves, and nothing new is tried
        captured = [tritongemm.mm(*given) for given in results]
        tritongemm.mm(*new)
    graph.replay()
    for y, given in zip(captured, results):
        torch.testing.assert_close(y, torch.nn.functional.linear(*given), rtol=2e-2, atol=2e-1)
print("tried", len(tried))
"""


def run(folder: Path, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITONGEMM_CACHE": str(folder / "cache")} | variables
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes(tmp_path: Path) -> None:
    started = time.monotonic()
    first = run(tmp_path, TRITONGEMM_ONLINE="1", TRITONGEMM_ONLINE_SECONDS="2:20")
    assert "tried 3" in first and time.monotonic() - started < 120
    table = (tmp_path / CSV_FILE).read_text().splitlines()
    assert table[0] == CSV_HEADER and len(table) == 4 and all(row.count(",") == 19 for row in table)
    assert len((tmp_path / "cache" / FILE).read_text().splitlines()) == 3
    second = run(tmp_path, HIP_ONLINE_TUNING="1")
    assert "tried 0" in second and (tmp_path / CSV_FILE).read_text().splitlines() == table


def test_off_it_leaves_no_file(tmp_path: Path) -> None:
    assert "tried 0" in run(tmp_path, TRITONGEMM_ONLINE="0", HIP_ONLINE_TUNING="")
    assert not (tmp_path / CSV_FILE).exists() and not (tmp_path / "cache" / FILE).exists()
