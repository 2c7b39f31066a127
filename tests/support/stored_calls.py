"""A library of products with scales, batches, groups and the kernels beside them, whose code objects are JSON.

Run with a library's path it serves each public call where nothing that compiles can be imported, and prints how. With
``cuda`` behind the path that is on a GPU, from a library of real kernels of the same results. Else a GPU stands in,
which reads the parameters of each launch as the kernel would, and computes on the CPU.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.json_kernels import TOKENS, Interpreted
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.launch import Launch, Param
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record

_SIZES = ("stride_a", "stride_b", "stride_c", "batch_a", "batch_b", "batch_c")
BLOCKS = "a8w8_blockscale"
EXPERTS, HIDDEN, INNER, TOPK = 4, 256, 128, 2
_WIDE, _NARROW = Config("tile", 16, 64, 128, 1, 1, 4, 3), Config("tile", 16, 32, 64, 1, 1, 4, 2)
_GROUPED = Config("grouped", 16, 64, 128, 1, 1, 4, 2, (("per_unit", 1),))
CONFIGS = {"heads": _NARROW, "scaled batch": _NARROW, "rows": _WIDE, "blocks": _WIDE}  # the others are of groups


def records(fp8: str = "fp8e4m3fn") -> dict[str, Record]:
    """What the library holds, by names; that of blocks serves a range of M."""
    from tests.support import libraries

    found = {name: libraries.tuned(problem) for name, problem in problems(fp8).items()}
    return {
        name: replace(record, config=CONFIGS.get(name, _GROUPED), m_from=int(name == "blocks"))
        for name, record in found.items()
    }


def problems(fp8: str) -> dict[str, Problem]:
    from tritongemm.plugins import registry
    from tritongemm.plugins.contracts import Family

    def made(family: str, m: int, n: int, k: int, dtype: str = fp8, **form: Any) -> Problem:
        one: Problem = registry.get(Family, family).problem(
            Problem(m, n, k, *matrices(dtype, c="bf16", layout="TN"), **form)
        )
        return one

    return {
        "rows": made("a8w8", 16, 64, 256, bias="n"),
        "blocks": made(BLOCKS, 32, 128, 384),
        "heads": made("dense", 8, 32, 64, "bf16", batch=3),
        "scaled batch": made("a8w8", 8, 32, 64, batch=3),
        "first": made(BLOCKS, 40, 2 * INNER, HIDDEN, groups=Groups(EXPERTS)),
        "second": made(BLOCKS, 40, HIDDEN, INNER, groups=Groups(EXPERTS)),
        "plain first": made("dense", 40, 2 * INNER, HIDDEN, "bf16", groups=Groups(EXPERTS)),
        "plain second": made("dense", 40, HIDDEN, INNER, "bf16", groups=Groups(EXPERTS)),
    }


def write(path: Path, patch: Any, lacking: str = "") -> None:
    """Write the library; `lacking` is the kernel beside the products that it has not."""
    from tests.support import libraries
    from tritongemm.build import helpers
    from tritongemm.core.launch import StridePlaces
    from tritongemm.export.library import building, writing
    from tritongemm.export.library.entry import LibraryEntry
    from tritongemm.export.library.launch_table import LaunchTable, tabulate
    from tritongemm.operations.torch_limits import serves_other_m
    from tritongemm.search_spaces import loader

    pairs: list[tuple[LibraryEntry, bytes]] = []
    for name, record in records().items():
        problem = record.problem
        others = serves_other_m(problem, "sm90")
        table = tabulate(partial(_launch_at, problem), 1 if record.m_from or others else problem.m, problem.m, 16)
        assert isinstance(table, LaunchTable), table
        table = building.widen(table, partial(_launch_at, problem), 16, 1000) if others else table
        first = len(problem.operands) + 3
        places = {size: (first + index, 8) for index, size in enumerate(_SIZES)} if problem.batch > 1 else {}
        code = json.dumps({"name": name, "problem": problem.to_json()}).encode()
        one = libraries.entry(record, code, strides=StridePlaces(1 << 20, places) if places else None)
        assert one.kernel is not None
        pairs.append((replace(one, kernel=replace(one.kernel, launches=table)), code))
    torch_won = libraries.tuned(libraries.linear(8, 48, 32), winner="torch")
    contents = libraries.contents(*pairs, (LibraryEntry(torch_won), b""))
    patch.setattr(helpers, "compile_helpers", _compile_helpers(path.with_name("compiled"), lacking))
    target = loader.load_target("sm90")
    built = building.build_helpers([e.record for e, _ in pairs], target, libraries.TRITON)
    assert bool(built.left_out) == bool(lacking)
    codes = {helper.sha256: code for helper, code in built.helpers}
    readers = {sha256: lambda code=code: code for sha256, code in codes.items()}
    writing.add_beside(contents, [helper for helper, _ in built.helpers], {"sm90": target}, readers)
    with writing.held(path):
        writing.write(path, contents)


def _launch_at(problem: Problem, m: int) -> Launch:
    """A launch that has all operands, the sizes and the strides of a problem at an M."""
    problem = problem.at(m)
    apart = {name: spec.count // max(spec.batch, 1) * bool(spec.batch) for name, spec in problem.operands.items()}
    params = [Param("pointer", name) for name in problem.operands]
    params += [Param("i32", size) for size in (problem.m, problem.n, problem.k)]
    params += [Param("i32", size) for size in (problem.k, problem.k, problem.n)]
    params += [Param("i64", apart[name]) for name in "abc"]
    return Launch(
        "", "product", (-(-problem.m // 16), -(-problem.n // 32), problem.batch), (128, 1, 1), 0, tuple(params), ()
    )


def _compile_helpers(folder: Path, lacking: str) -> Callable[..., list[Any]]:
    """Stands in for the compiler: code objects that list the kernel's parameters."""
    from hashlib import sha256

    from tritongemm.core.artifact import Artifact

    folder.mkdir()

    def compile_helpers(wanted: Iterable[Any], target: Any, cache: Any) -> Iterator[Artifact]:
        for number, helper in enumerate(wanted):
            known = {"kernel": helper.name, "signature": helper.signature, "constants": helper.constants}
            path = folder / f"{number}.cubin"
            path.write_text(json.dumps(known))
            kinds = ["pointer" if kind[0] == "*" else kind for kind in helper.signature.values()] + ["pointer"] * 2
            offsets = Launch("", "", (1, 1, 1), (1, 1, 1), 0, tuple(Param(kind, 0) for kind in kinds), ()).offsets()
            launch = {"dynamic_shared": 0, "offsets": offsets}
            status = "compile_failed" if helper.name == lacking else "ok"
            code = sha256(path.read_bytes()).hexdigest()
            config = Config(helper.name, 0, 0, 0)
            yield Artifact(config, "0" * 40, str(path), code, helper.name, threads=128, status=status, launch=launch)

    return lambda *given: list(compile_helpers(*given))


def stand_in(patch: Any) -> list[str]:
    """Have the CPU stand in for a machine's one GPU; the names of the kernels that it is asked to launch."""
    import torch

    from tests.support import serve_library

    launched: list[str] = []
    host = serve_library.stand_in(patch)
    patch.setattr(host, "load", lambda code: SimpleNamespace(function=lambda symbol: Interpreted(code, launched)))
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.cuda, "current_device", lambda: -1)
    patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return launched


def calls(device: str = "cpu", fp8: str = "float8_e4m3fn") -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Each public call: its name, what calls it, and its result in float64."""
    import torch

    import tritongemm

    torch.manual_seed(0)
    eight = getattr(torch, fp8)

    def made(*shape: int) -> Any:
        return torch.randn(shape).to(torch.bfloat16).to(device)

    x, w, bias = made(16, 256), made(64, 256), made(64)
    (a, of_a), (b, of_b) = tritongemm.quantize(x, "row", eight), tritongemm.quantize(w, "row", eight)
    yield "quantize", lambda: _product(*tritongemm.quantize(x, "row", eight)), x.double()
    exact = _product(a, of_a) @ _product(b, of_b).T + bias.double()
    yield "scaled_mm", lambda: tritongemm.scaled_mm(a, b, of_a, of_b, bias), exact
    y, v, of_v = made(5, 384), (made(128, 384) * 10).to(eight), made(1, 3).abs().float() + 0.5
    exact = y.double() @ (v.double() * of_v.double().repeat_interleave(128, 0).repeat_interleave(128, 1)).T
    yield "linear_fp8", lambda: tritongemm.linear_fp8(y, v, of_v), exact
    heads, weights = made(8, 3, 80)[:, :, :64].transpose(0, 1), made(3, 32, 64).mT
    yield "bmm", lambda: tritongemm.bmm(heads, weights), heads.double() @ weights.double()
    for m in (8, 3, 40):
        (c, of_c), (d, of_d) = (tritongemm.quantize(made(3 * rows, 64), "row", eight) for rows in (m, 32))
        c, d, of_c, of_d = c.view(3, m, 64), d.view(3, 32, 64), of_c.view(3, m), of_d.view(3, 32)
        exact = _product(c, of_c[..., None]) @ _product(d, of_d[..., None]).mT
        yield "scaled_bmm", partial(tritongemm.scaled_bmm, c, d.mT, of_c, of_d), exact
    for m, numbers in ((20, [5, 5, 12, 20]), (200, [150, 150, 151, 200])):  # those of the largest M serve more rows
        e, f, ends = made(m, HIDDEN), made(EXPERTS, 2 * INNER, HIDDEN), torch.tensor(numbers, dtype=torch.int32)
        groups = torch.bucketize(torch.arange(m), ends.long(), right=True)
        exact = torch.stack([e[row].double() @ f[group].double().T for row, group in enumerate(groups.tolist())])
        given = e, f.mT, ends.to(device)
        yield "grouped_mm", partial(tritongemm.grouped_mm, *given), exact
    yield from mixtures(device, eight)


def _product(q: Any, scale: Any) -> Any:
    return q.double() * scale.double()


def mixtures(device: str, eight: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """A mixture of experts in bf16 and in fp8 with factors of blocks; as `calls`."""
    import torch
    from torch.nn import functional

    import tritongemm

    x = torch.randn(TOKENS, HIDDEN).bfloat16().to(device)
    weights, ids = torch.rand(TOKENS, TOPK).to(device), torch.randint(-1, EXPERTS, (TOKENS, TOPK)).to(device)
    w1 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).bfloat16().to(device)
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5).bfloat16().to(device)
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device=device)
    for expert in range(EXPERTS):
        gate, up = (x.double() @ w1[expert].double().T).chunk(2, 1)
        share = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True).double()
        exact += share * ((functional.silu(gate) * up) @ w2[expert].double().T)
    yield "fused_moe", lambda: tritongemm.fused_moe(x, w1, w2, weights, ids), exact
    packed = []
    for w in (w1, w2):
        blocks = w.float().view(EXPERTS, w.shape[1] // 128, 128, -1, 128)
        of_blocks = blocks.abs().amax((2, 4)) / torch.finfo(eight).max
        packed.append(((blocks / of_blocks[:, :, None, :, None]).view(w.shape).to(eight), of_blocks))
    (q1, s1), (q2, s2) = packed
    yield "fused_moe of fp8", lambda: tritongemm.fused_moe(x, q1, q2, weights, ids, "silu", s1, s2), exact


def main(path: str, device: str = "cpu", fp8: str = "float8_e4m3fn") -> None:
    """Serve each call, and print how far it is off, and what was launched for it."""
    from tests.support.serve_library import REFUSED, RefusingFinder

    RefusingFinder().install()
    sys.modules["tritongemm.build.pool"] = None  # type: ignore[assignment]
    import warnings

    import pytest

    import tritongemm

    launched = stand_in(pytest.MonkeyPatch()) if device == "cpu" else []
    print("rows", int(tritongemm.load(path)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, call, exact in calls(device, fp8):
            launched.clear()
            found = [call()] if device == "cpu" else [call(), _captured(call)]
            close = all((one.double() - exact).norm() <= 0.1 * exact.norm() for one in found)
            print(f"{name}: {', '.join([*launched, 'right' if close else 'wrong'])}")
    for warning in caught:
        print("warned:", str(warning.message).partition(" (")[0])
    print("imported", sorted(name for name in REFUSED if name in sys.modules))
    if device != "cpu":
        print("not loaded", _not_loaded())


def _captured(call: Callable[[], Any]) -> Any:
    """The result of a call that a graph holds."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    torch.cuda.synchronize()
    return found.clone()


def _not_loaded() -> list[str]:
    """The entries whose kernels were not called."""
    from tritongemm.serving.dispatcher import default_dispatcher

    kernels = default_dispatcher().device(0)
    assert kernels is not None
    (library,) = kernels.libraries
    there = {sha256 for sha256, _ in kernels.loaded_code.functions}
    return [e.name for e in library.entries if e.kernel is not None and e.kernel.sha256 not in there]


if __name__ == "__main__":
    main(*sys.argv[1:])
