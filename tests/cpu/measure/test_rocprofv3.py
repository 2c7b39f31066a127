import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.nouns import BASELINE_ENTRY, Artifact, Config, MeasureProtocol, Patch, Trial, load_target, registry
from tests.support.refusals import fails
from tests.support.tables import cases, each
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.jobs import MeasureAnswer, MeasureJob, OperandsReady, VerifyJob, WrongBaseline
from tritongemm.measure.timers import rocprofv3
from tritongemm.plugins.contracts import Backend, ExternalRaceJob, ExternalTimer

HEADER = (
    '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id",'
    '"Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count",'
    '"Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"\n'
)  # of 1.x
OLD_HEADER = (
    '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp",'
    '"Private_Segment_Size","Group_Segment_Size","Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z",'
    '"Grid_Size_X","Grid_Size_Y","Grid_Size_Z"\n'
)  # of 0.4


def row(dispatch: int, name: str, start: int, end: int) -> str:
    rest = "0,0,12,4,48,256,1,1,8192,1,1"
    return f'"KERNEL_DISPATCH","Agent 4",1,0,852831,{dispatch},15,"{name}",{dispatch},{start},{end},{rest}\n'


def old_row(_: int, name: str, start: int, end: int) -> str:
    return f'"KERNEL_DISPATCH",1,139690710949888,15,"{name}",0,{start},{end},0,0,256,1,1,8192,1,1\n'


@each(("header", "line"), [(HEADER, row), (OLD_HEADER, old_row)])
def test_a_kernel_trace_is_read_in_the_order_of_launching(
    tmp_path: Path, header: str, line: Callable[[int, str, int, int], str]
) -> None:
    at = 1551874061244694
    functor = "at::native::FillFunctor<float>, std::array<char*, 1ul> "
    fill = f"void at::native::vectorized_elementwise_kernel<4, {functor}>(int)"
    rows = [
        line(2, "next_launch.kd", at + 9000, at + 9500),
        line(1, fill, at, at + 4000),
        line(3, "gemm", at + 9900, at + 9990),
    ]
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "4242_kernel_trace.csv").write_text(header + "".join(rows))
    (tmp_path / "host" / "4243_kernel_trace.csv").write_text(header + line(1, "a_child_of_it", at, at + 1))
    (tmp_path / "host" / "4242_agent_info.csv").write_text('"Node_Id"\n0\n')
    records = rocprofv3.read_trace(tmp_path)
    assert [r.name for r in records] == [fill, "next_launch", "gemm"] and records[2].seconds == pytest.approx(90e-9)


def test_traces_that_are_cut_off_and_rows_of_the_launch_they_follow(tmp_path: Path) -> None:
    fails(TraceError, "0 kernel traces were written", rocprofv3.read_trace, tmp_path)
    path = tmp_path / "1_kernel_trace.csv"
    path.write_text(HEADER + row(1, "gemm", 1, 2))
    fails(TraceError, "1 kernel traces were written, 0 of them with marked launches", rocprofv3.read_trace, tmp_path)
    path.write_text((HEADER + row(1, "next_launch", 1, 2) * 3)[:-60])
    fails(TraceError, r"1_kernel_trace\.csv is not a complete kernel trace", rocprofv3.read_trace, tmp_path)
    mark = rocprofv3.MARK
    turn = [mark, "a", mark, "b", mark, "split", "reduce"]
    found = rocprofv3.launch_seconds(records("warm", "up", *turn, *turn, mark), ["a", "b", BASELINE_ENTRY], 2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2, BASELINE_ENTRY: 2}
    assert found["a"] == pytest.approx([1e-7] * 2) and found[BASELINE_ENTRY] == pytest.approx([2e-7] * 2)


def records(*names: str) -> list[KernelRecord]:
    return [KernelRecord(name, 1000 * i + 1, 1000 * i + 101) for i, name in enumerate(names)]


@cases(
    (["M", "a", "M", "b"], "2 launches were made, the trace has 1"),
    (["M", "a", "M", "b", "M", "a", "M"], "2 launches were made, the trace has 3"),
    (["M", "a", "M", "M"], "launch 1 was b, its rows say nothing"),
    (["M", "b", "M", "a", "M"], "launch 0 was a, its rows say b"),
    (["M", "a", "a", "M", "b", "M"], "launch 0 was a, its rows say a, a"),
    ([], "the trace has 0"),
)
def test_rows_that_are_missing_or_others_are_an_error(names: list[str], message: str, /) -> None:
    with pytest.raises(TraceError, match=message):
        rocprofv3.launch_seconds(records(*(rocprofv3.MARK if n == "M" else n for n in names)), ["a", "b"], 1)


TOOL = """#!{python}
import ast, pathlib, sys
options, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
assert options[:3] == ["--kernel-trace", "-f", "csv"] and options[3] == "-d", options
text = pathlib.Path(command[1]).read_text()
ast.parse(text)
rounds, names = int(command[command.index("--trace") + 1]), command[command.index("--config") + 1 :]
assert all(f"\\n{{name}} " in text for name in names), "a config that the module does not have"
if {status}:
    sys.exit("the GPU fell over")
if "--library" in command:
    names.append("rocblas_gemm")
at, lines, dispatch = 10**15, [{header!r}], 0
def line(name, ns):
    global at, dispatch
    at, dispatch = at + ns + 10, dispatch + 1
    values = f'{{dispatch}},1,"{{name}}",1,{{at - ns}},{{at}},0,0,8,0,16,64,1,1,64,1,1\\n'
    lines.append('"KERNEL_DISPATCH","Agent 4",1,0,1,' + values)
line("fill", 100)
for i in range(rounds):
    for j, name in enumerate(names):
        line("next_launch", 10)
        if not ({lose} and i == 2 and j == 0):
            line(name, 1000 * (j + 1) + i)
line("next_launch", 10)
folder = pathlib.Path(options[4]) / "host"
folder.mkdir(parents=True)
(folder / "99_kernel_trace.csv").write_text("".join(lines))
"""
CONFIGS = [Config("tile", 32, 32, 32), Config("tile", 64, 32, 32)]


Tool = Callable[..., None]  # puts the tool on PATH


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: Patch) -> Tool:
    def put(status: int = 0, lose: int = 0) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / "rocprofv3"
        path.write_text(TOOL.format(python=sys.executable, status=status, lose=lose, header=HEADER))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return put


SIZE = Problem(64, 64, 64)


def timer() -> ExternalTimer:
    return registry.get(ExternalTimer, "rocprofv3")


def run(problem: Problem = SIZE, configs: list[Config] = CONFIGS, baseline: str = "torch") -> dict[str, list[float]]:
    target = load_target("gfx942")
    job = ExternalRaceJob(problem, target, tuple(configs), baseline, 0, rotating_mb=64, warmup=2, iters=3, timeout_s=30)
    return timer().race(job)


def test_the_tool_watches_the_generated_module(tool: Tool) -> None:
    tool()
    assert timer().available()
    found = run()
    assert list(found) == [*(c.name for c in CONFIGS), BASELINE_ENTRY]
    for turn, seconds in enumerate(found.values(), 1):
        assert seconds == pytest.approx([(1000 * turn + i) * 1e-9 for i in (2, 3, 4)]), "two rounds are warm-up"
    assert BASELINE_ENTRY not in run(baseline="")
    fp8 = Problem(64, 64, 64, *matrices("fp8e4m3fnuz", c="bf16"))
    assert BASELINE_ENTRY not in run(fp8), "PyTorch would copy its operands"


def test_what_the_tool_can_not_do_is_named(tool: Tool, monkeypatch: Patch) -> None:
    with pytest.raises(InputError, match="the generated module, which has no kernels of asm"):
        run(configs=[*CONFIGS, Config("tile", 64, 32, 32, backend="asm")])
    tool(status=1)
    fails(TraceError, r"exit status 1 for 64x64x64\S*: the GPU fell over", run)
    tool(lose=1)
    fails(TraceError, f"launch 6 was {CONFIGS[0].name}, its rows say nothing", run)
    monkeypatch.setattr(rocprofv3, "folders", lambda: [Path("/opt/rocm-9/bin")])
    monkeypatch.setenv("PATH", "/none")
    fails(UnavailableError, "rocprofv3: not found on PATH nor in /opt/rocm-9/bin", run)


def test_the_final_race_is_run_by_the_tool(tool: Tool, monkeypatch: Patch) -> None:
    """Candidates are verified in the GPU's process; those that pass are timed from the trace."""
    tool()
    asked: list[MeasureJob] = []
    wrong: list[MeasureAnswer] = []

    def ask(job: MeasureJob, timeout: float) -> Iterator[MeasureAnswer]:
        asked.append(job)
        yield OperandsReady(1, True)
        yield Trial(CONFIGS[0], "ok", stage="final", error=0.0)
        yield Trial(CONFIGS[1], "wrong", "off by one", stage="final")
        yield from wrong

    gpu = GpuEvaluator(load_target("gfx942"), "amd", 0, MeasureProtocol("rocprofv3", iters=3, warmup=2), 30.0)
    monkeypatch.setattr(gpu, "_process", SimpleNamespace(ask=ask))
    monkeypatch.setattr(registry.get(Backend, "triton"), "launch", lambda artifact, problem, target: None)
    final = gpu.race(Problem(64, 64, 64), [Artifact(c, "") for c in CONFIGS], "torch")
    assert [type(job) for job in asked] == [VerifyJob] and set(final.samples) == {CONFIGS[0].name, BASELINE_ENTRY}
    assert (final.trials[0].timer, len(final.trials[0].samples), final.trials[1].samples) == ("rocprofv3", 3, ())
    wrong.append(WrongBaseline("off by two"))
    final = gpu.race(Problem(64, 64, 64), [Artifact(c, "") for c in CONFIGS], "torch")
    assert (set(final.samples), final.library_wrong) == ({CONFIGS[0].name}, "off by two")
