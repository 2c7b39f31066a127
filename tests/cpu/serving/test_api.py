import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import tritongemm
from tests.support import ROOT, forked
from tests.support.linear_layers import problem, record
from tests.support.nouns import Groups, Patch, Scaling, each, fails, refuses
from tritongemm.operations.served_problems import is_layer
from tritongemm.operations.torch_products import linear
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.source_row import read_source


@each("lead", [(), (7,), (2, 3)])
@each("with_bias", [False, True])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_linear(lead: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    x, w = torch.randn(*lead, 24).to(dtype), torch.randn(10, 24).to(dtype)
    bias = torch.randn(10).to(dtype) if with_bias else None
    assert torch.equal(tritongemm.mm(x, w, bias), functional.linear(x, w, bias))
    assert tritongemm.mm(x, w, bias).shape == (*lead, 10)


def test_eight_bits_and_wrong_shapes_and_a_light_import() -> None:
    x, w = torch.randint(-100, 100, (20, 64), dtype=torch.int8), torch.randint(-100, 100, (8, 64), dtype=torch.int8)
    exact = x.long() @ w.long().T
    assert torch.equal(tritongemm.mm(x, w).long(), exact) and tritongemm.mm(x, w).dtype == torch.int32
    a, b = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.randn(8, 32).to(torch.float8_e4m3fn)
    assert torch.equal(tritongemm.mm(a, b), (a.float() @ b.float().T).half())
    fails(RuntimeError, "mat1 and mat2", tritongemm.mm, torch.randn(2, 8), torch.randn(4, 9))
    x, w, bias = torch.randn(5, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.randn(9)
    out = tritongemm.mm(x, w, bias, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, functional.linear(x.float(), w.float(), bias))
    assert tritongemm.mm(x.float(), w.float(), bias, torch.bfloat16).dtype == torch.bfloat16
    code = """
import sys, torch
import tritongemm
tritongemm.mm
heavy = [m for m in ("triton", "jinja2", "joblib", "yaml", "rich") if m in sys.modules]
assert not heavy, heavy
"""
    done = forked.run(["-c", code], ROOT)
    assert done.returncode == 0, done.stderr
    code = "import sys, tritongemm, tritongemm.tune.__main__, tritongemm.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_pytorchs() -> None:
    """They have no shape to look a kernel up by."""
    parts, w = [torch.randn(3, 8), torch.randn(2, 8)], torch.randn(4, 8)
    nested = torch.nested.nested_tensor(parts)
    for out_dtype in (None, torch.float64):
        for part, one in zip(parts, tritongemm.mm(nested, w, out_dtype=out_dtype).unbind(), strict=True):
            torch.testing.assert_close(one, functional.linear(part.to(one.dtype), w.to(one.dtype)))
    assert tritongemm.explain(nested, w) == "fallback: x is on cpu; tuned kernels run on a GPU"


def test_what_can_not_be_loaded_is_refused(tmp_path: Path) -> None:
    """In a moment: a pipe without a writer is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    dispatcher, good = Dispatcher(), record(problem(1, 2, 3))
    for source, complaint in (
        (tmp_path / "missing.yaml", "there is no such file"),
        (tmp_path, "is no library: it has no library.json"),
        (str(tmp_path / "pipe"), "is a pipe, a socket or a device; name a results file"),
        ("/dev/zero", "/dev/zero is a pipe, a socket or a device"),
        ("a\0b", "can't be the name of a file"),
    ):
        refuses(complaint, dispatcher.load, source)
    for strange in (b"out.yaml", 7, None):
        with pytest.raises(
            TypeError, match=f"load takes the path of a results file, or records, not {type(strange).__name__}"
        ):
            dispatcher.load(strange)  # type: ignore[arg-type]
    fails(TypeError, "one of those given is a int", dispatcher.load, [good, 2])
    assert dispatcher.load(iter([good])) == 1 and dispatcher.load([]) == 0


def test_threads_whose_first_act_is_to_load(tmp_path: Path) -> None:
    """Each imports what the others import too; in a process of its own, where nothing is imported yet."""
    (tmp_path / "tuned.yaml").write_text(
        "- {M: 16, N: 16, K: 16, rowMajorB: N, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16, time(us): 5, "
        "target: gfx942, timer: events}\n"
    )
    code = f"""
import sys, threading, torch
sys.setswitchinterval(1e-5)
import tritongemm
outcomes, ready = [], threading.Barrier(4)
def first():
    ready.wait()
    try:
        outcomes.append(int(tritongemm.load({str(tmp_path / "tuned.yaml")!r})))
    except BaseException as error:
        outcomes.append(repr(error))
threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(outcomes)
"""
    said = forked.run(["-c", code], ROOT)
    assert said.stdout == "[1, 1, 1, 1]\n", said.stderr


def test_forward_derivatives_flow(monkeypatch: Patch) -> None:
    forward = torch.autograd.forward_ad
    x, w, tangent = torch.randn(3, 8), torch.randn(4, 8), torch.randn(3, 8)
    tritongemm.mm(x, w)
    # Were the call resolved, it would lose the tangent.
    monkeypatch.setattr(default_dispatcher(), "resolve_layer", lambda *_: pytest.fail("resolved"))
    monkeypatch.setattr(default_dispatcher().calls, "table", {})
    with forward.dual_level():
        out = tritongemm.mm(forward.make_dual(x, tangent), w)
        torch.testing.assert_close(forward.unpack_dual(out).tangent, tangent @ w.T)


# What is said of tensors on a GPU, with tensors that pretend to be there.


def test_records_that_mm_can_ask_for(tmp_path: Path) -> None:
    assert is_layer(problem(1, 2, 3)) and is_layer(problem(1, 2, 3, "n"))
    one = problem(1, 2, 3)
    wrong = [one.stored(True, True), one.stored(False, False), one.scaled((Scaling("fp32", 1), None))]
    changes: list[dict[str, Any]] = [{"bias": "m"}, {"batch": 2}, {"family": "other"}, {"groups": Groups(2)}]
    changes.append({"b": one.b._replace(order="shuffled_16x16")})
    assert not any(map(is_layer, [*wrong, *(replace(one, **change) for change in changes)]))
    file = tmp_path / "tuned.yaml"
    from tritongemm.formats import results_format

    records = [record(problem(16, 32, 64)), record(problem(16, 32, 64), target="gfx942")]
    file.write_text(results_format().write(records))
    assert [row.record for row in read_source(file)] == records
    file.write_text("- {M: 1, N: 2, K: 3}\n")
    refuses("no tuned result", read_source, file)


def test_calls_are_kept_for_each_thread_and_dropped_by_load(monkeypatch: Patch) -> None:
    dispatcher = Dispatcher()
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    dispatcher.run(x, w, None, None)
    assert len(dispatcher.calls.table) == 1
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(len(dispatcher.calls.table)))
    thread.start()
    thread.join()
    assert sizes == [0]
    monkeypatch.setattr("tritongemm.serving.calls._MOST_CALLS", 4)
    for rows in range(1, 20):
        dispatcher.run(torch.randn(rows, 8), w, None, None)
    assert len(dispatcher.calls.table) <= 4
    dispatcher.load([])
    assert not dispatcher.calls.table


def test_there_is_one_dispatcher_and_calls_can_be_listed() -> None:
    """For tab completion; `python -m tritongemm --version` names the same version."""
    assert isinstance(default_dispatcher(), Dispatcher) and default_dispatcher() is default_dispatcher()
    assert torch.equal(linear(torch.ones(1, 2), torch.ones(3, 2), None, None), torch.full((1, 3), 2.0))
    names = dir(tritongemm)
    assert {"mm", "load", "patch", "serve", "capture", "__version__"} <= {*names}
    assert "settings" not in names and all(hasattr(tritongemm, name) for name in names)
    assert forked.run(["-m", "tritongemm", "--version"], ROOT).stdout.strip() == f"tritongemm {tritongemm.__version__}"
