import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.gpu.here import DENSE, fp8, needed_fp8, normal, record, replayed
from tests.gpu.test_dispatch import CASES
from tests.support import ROOT, stored_calls
from tests.support.nouns import Dispatcher, Machine, Patch, Record, settings, verify
from tritongemm.core.dtypes import DTYPES
from tritongemm.export.library import building, writing
from tritongemm.export.library.building import Built
from tritongemm.export.library.writing import Contents

RANGED = ("tile", "split", "stream-K", "tma", "persistent")  # cases that are tried as ranges of M too
SERVED = """
import sys
from tests.support.serve_library import REFUSED, RefusingFinder
RefusingFinder().install()
import torch, tritongemm
print(int(tritongemm.load(sys.argv[1])))
for m, n, k in eval(sys.argv[2]):
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    got, want = tritongemm.mm(x, w).double(), x.double() @ w.double().T
    assert (got - want).abs().max() <= 2e-2 * want.abs().max(), (m, n, k)
    print(tritongemm.explain(x, w).split(":")[0])
print([name for name in REFUSED if name in sys.modules])
"""


def write(built: Built, path: Path) -> tuple[Path, list[Record]]:
    contents = Contents()
    writing.merge(contents, built.entries, built.readers())
    writing.add_beside(contents, built.helpers, built.targets, built.readers())
    with writing.held(path):
        writing.write(path, contents)
    return path, [entry.record for entry in contents.entries.values()]


@pytest.fixture(scope="module")
def library(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A library of this GPU's kernels, each of one size, and some of ranges of M, and its results."""
    records = [record(*case) for case in CASES.values() if case[0].c.dtype == "bf16" and case[0].bias == "none"]
    records += [
        record(replace(p, bias="none", n=p.n + 8), config, m_from=max(1, p.m // 2))
        for p, config in (CASES[name] for name in RANGED if name in CASES)
    ]
    built = building.build(records, gpu_machine)
    assert len(built.entries) > len(records) // 2, built.left_out
    return write(built, tmp_path_factory.mktemp("library") / "kernels.zip")


def test_every_kernel_is_right_at_every_m(library: tuple[Path, list[Record]]) -> None:
    path, records = library
    dispatcher = Dispatcher()
    dispatcher.load(path)
    for one in records:
        low, high = one.m_from or one.problem.m, one.problem.m
        for m in sorted({low, (low + high) // 2, high - 1 if one.m_from else high, high}):
            p = one.problem.at(m)
            x, w = normal(m, p.k), normal(p.n, p.k)
            for _ in range(2):
                c = dispatcher.run(x, w, None, None)
            kind = dispatcher.explain(x, w).resolution.kind
            assert kind == ("exact" if m == high else "range"), f"{p.key}: {dispatcher.explain(x, w)}"
            assert verify.deviation(c, (x.double() @ w.double().T)) <= DENSE.tolerance(p), p.key


def test_a_kernel_that_was_called_is_captured(library: tuple[Path, list[Record]]) -> None:
    path, records = library
    dispatcher, p = Dispatcher(), records[0].problem
    dispatcher.load(path)
    x, w = normal(p.m, p.k), normal(p.n, p.k)
    expected = dispatcher.run(x, w, None, None)
    torch.cuda.synchronize()
    assert torch.equal(replayed(dispatcher.run, x, w, None, None), expected)


def test_it_serves_where_nothing_can_be_compiled(library: tuple[Path, list[Record]]) -> None:
    path, records = library
    sizes = [(r.problem.m, r.problem.n, r.problem.k) for r in records]
    command = [sys.executable, "-c", SERVED, str(path), repr(sizes)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(len(records)), *["exact"] * len(records), "[]"]
    print(f"{len(records)} kernels of a library served in {time.perf_counter() - started:.1f} s with imports")


@pytest.fixture(scope="module")
def all_calls(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of products with scales, batches and groups, and of the kernels beside them."""
    target = gpu_machine.target
    tools = {"triton": settings.version("triton")}
    records = [
        replace(one, target=target.name, compute_units=target.compute_units, toolchain=tools)
        for one in stored_calls.records(needed_fp8(target)).values()
    ]
    built = building.build(records, gpu_machine)
    assert not built.left_out and not built.compiled_late, (built.left_out, built.compiled_late)
    return write(built, tmp_path_factory.mktemp("all_calls") / "kernels.zip")[0]


def test_calls_are_served_where_nothing_can_be_compiled(gpu_machine: Machine, all_calls: Path, tmp_path: Path) -> None:
    """Eager and captured, against float64; no kernel of the library is left uncalled, and no call was PyTorch's."""
    encoding = DTYPES[fp8(gpu_machine.target)].torch
    command = [sys.executable, "-m", "tests.support.stored_calls", str(all_calls), "cuda", encoding]
    environment = {**os.environ, "TRITONGEMM_CACHE": str(tmp_path / "cache")}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "rows 8" and said[-2:] == ["imported []", "not loaded []"], done.stdout
    assert all(line.endswith(": right") for line in said[1:-2]) and len(said) == 14, done.stdout
    assert not [*tmp_path.rglob("*.cubin"), *tmp_path.rglob("*.hsaco")], "nothing was compiled"
    print(f"every call was served from a library in {time.perf_counter() - started:.1f} s with imports")


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("m", [1, 300])
def test_stored_kernels_quantise_as_compiled_ones_do(
    gpu_machine: Machine, all_calls: Path, monkeypatch: Patch, granularity: str, m: int
) -> None:
    """Equal to the last bit; of `tensor`, which no product of the library wants, both are compiled."""
    dtype = getattr(torch, DTYPES[fp8(gpu_machine.target)].torch)
    x = torch.randn(m, 384 if granularity == "block" else 256, device="cuda").bfloat16()
    found = []
    for source in (all_calls, None):
        dispatcher = Dispatcher()
        if source is not None:
            dispatcher.load(source)
        monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
        found.append(tritongemm.quantize(x, granularity, dtype))
    assert torch.equal(found[0][0].float(), found[1][0].float()) and torch.equal(found[0][1], found[1][1])
