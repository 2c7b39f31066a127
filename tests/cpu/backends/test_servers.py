"""The backends of servers' own kernels, against stand-ins of the servers' modules; and against the real modules in
Triton's interpreter, where those are installed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT, scaled_operands
from tests.support.fakes import server_kernels
from tests.support.nouns import Config, Groups, Patch, Problem, UnavailableError, loader, matrices, registry
from tests.support.plugins import rescan
from tests.support.refusals import fails
from tests.support.scaled_operands import PAIRS
from tests.support.tables import cases, each
from tritongemm.backends import _expert_blocks, _server_kernels
from tritongemm.backends._server_kernels import ServerBackend
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.tune.roster import choose_roster

SM90, GFX942 = map(loader.load_target, ("sm90", "gfx942"))
SERVERS = {"vllm": server_kernels.install_vllm, "sglang": server_kernels.install_sglang}
FAMILY = registry.get(Family, "a8w8_blockscale")
DENSE: Problem = FAMILY.problem(Problem(64, 4096, 7168, *matrices("fp8e4m3fn", c="bf16", layout="TN")))


def backend(name: str) -> ServerBackend:
    found = registry.get(LibraryBackend, name)
    assert isinstance(found, ServerBackend)
    return found


def grouped(counts: tuple[int, ...], n: int = 136, k: int = 200) -> Problem:
    return FAMILY.problem(
        Problem(
            sum(counts), n, k, *matrices("fp8e4m3fn", c="bf16", layout="TN"),
            groups=Groups(len(counts), spread="captured", counts=counts),
        ),
        "block_rows",
    )  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("pair", ["block, A in groups", "block, A in rows", "block, A padded"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 128), (33, 264, 328)])
def test_products_are_launched_as_servers_do(name: str, pair: str, m: int, n: int, k: int, monkeypatch: Patch) -> None:
    modules = SERVERS[name](monkeypatch)
    problem = scaled_operands.problem(m, n, k, PAIRS[pair])
    operands, exact = scaled_operands.operands(problem)
    assert backend(name).available() and backend(name).supports(problem, SM90)
    config, *_ = backend(name).list_algorithms(problem, operands, 2)
    for wanted in (None, config, replace(config, block_m=16, block_k=64, num_warps=8)):
        operands["c"].fill_(float("nan"))
        call = backend(name).operation(problem, operands, wanted)
        assert call is not None
        operands["c"].fill_(float("nan"))
        call()
        assert deviation(operands["c"], exact) < 2**-7
    kernels = [k for module in modules.values() for k in vars(module).values() if isinstance(k, server_kernels.Kernel)]
    ((*_, (grid, given)),) = [kernel.launches for kernel in kernels if kernel.launches]
    assert grid == (-(-m // 16) * -(-n // 128),) and (given["num_warps"], given["BLOCK_SIZE_K"]) == (8, 64)
    assert given.get("needs_masking", k % 64 != 0) == (k % 64 != 0)


def test_sglangs_kernel_of_hopper_swaps_operands_and_splits_k(monkeypatch: Patch) -> None:
    kernels = vars(server_kernels.install_sglang(monkeypatch)[server_kernels.SGLANG_PRODUCT])
    problem = scaled_operands.problem(5, 40, 1000, PAIRS["block, A in rows"])
    operands, exact = scaled_operands.operands(problem)
    plain = Config("tile", 16, 64, 128, backend="sglang")
    swapped = replace(plain, options=(("swap_ab", 1),))
    for config in (swapped, replace(plain, split_k=4), replace(swapped, split_k=8)):
        assert backend("sglang").check(config, problem, SM90) and not backend("vllm").check(
            replace(config, backend="vllm"), problem, SM90
        )
        assert not backend("sglang").check(config, problem, GFX942), "it is Hopper's"
        call = backend("sglang").operation(problem, operands, config)
        operands["c"].fill_(float("nan"))
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2**-7
        grid, given = kernels["_w8a8_block_fp8_matmul_hopper"].launches[-1]
        assert grid == (1, config.split_k) and given["SWAP_AB"] is bool(config.options)
    assert len(kernels["_reduce_block_fp8_split_k"].launches) == 4
    tried = backend("sglang").list_candidates(problem, SM90)
    assert {c.split_k for c in tried} >= {1, 2} and {c.option("swap_ab") for c in tried} == {0, 1}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("counts", [(5, 0, 20, 1), (0, 0, 16, 33), (1, *[0] * 14, 1)])
def test_experts_get_their_rows(name: str, counts: tuple[int, ...], monkeypatch: Patch) -> None:
    SERVERS[name](monkeypatch)
    problem = grouped(counts)
    assert backend(name).supports(problem, SM90)
    operands = FAMILY.make_inputs(problem, "cpu")
    operands["c"] = torch.full((problem.m, problem.n), float("nan"), dtype=torch.bfloat16)
    for config in backend(name).list_algorithms(problem, operands, 3):
        call = backend(name).operation(problem, operands, config)
        assert call is not None
        operands["c"].fill_(float("nan"))
        call()
        assert deviation(operands["c"], FAMILY.reference(problem, operands)) < FAMILY.tolerance(problem)


def test_blocks_of_rows_and_problems_that_are_none_of_its_kernels() -> None:
    blocks = _expert_blocks.aligned(torch.tensor([2, 2, 7], dtype=torch.int32), 7, 4)
    assert blocks.rows is not None and blocks.used.tolist() == [12]
    assert blocks.rows.tolist() == [0, 1, 7, 7, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7] and blocks.experts.tolist()[:3] == [
        0,
        2,
        2,
    ]
    few = _expert_blocks.one_row_each(torch.tensor([0, 1, 1, 2, 2, 2, 2, 2]), 2, 16)
    assert few.rows is None and few.experts.tolist() == [1, 3] and few.used.tolist() == [32]
    problem = FAMILY.problem(Problem(16, 256, 512, *matrices("fp8e4m3fn", c="bf16", layout="TN")))
    changes: list[Callable[[Problem], Problem]] = [
        lambda p: replace(p, a=p.a._replace(dtype="int8"), b=p.b._replace(dtype="int8")),
        lambda p: replace(p, b=p.b._replace(row_major=True)),
        lambda p: p.scaled((None, None)),
        lambda p: replace(p, bias="n"),
    ]
    for change in changes:
        assert backend("vllm").supports(problem, SM90) and not backend("vllm").supports(change(problem), SM90)
    fnuz = replace(problem, a=problem.a._replace(dtype="fp8e4m3fnuz"), b=problem.b._replace(dtype="fp8e4m3fnuz"))
    assert backend("vllm").supports(fnuz, GFX942) and not backend("sglang").supports(fnuz, GFX942)


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_not_imported_unasked(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patch:
        for found in (None, ModuleSpec(name, None)):  # the latter is of a folder that is no package
            patch.setattr(_server_kernels, "find_spec", lambda top, found=found: found)
            assert "not installed" in backend(name).available().reason
    (tmp_path / name / "__init__.py").write_text("raise ImportError('its CUDA is too old')\n", encoding="utf-8")
    rescan(tmp_path)
    assert backend(name).available(), "it is there; whether it loads is seen when it is asked for"
    for libtype in (None, "all"):
        roster = choose_roster(libtype, runs=True)
        assert name not in roster.backends and "asked for by its name" in roster.left_out[name]
    assert choose_roster(name, runs=True).backends == (name,)
    problem = scaled_operands.problem(1, 40, 128, PAIRS["block, A in rows"])
    with pytest.raises(UnavailableError, match="does not load: its CUDA is too old"):
        backend(name).list_algorithms(problem, scaled_operands.operands(problem)[0])


@each("name", SERVERS)
def test_another_version_of_a_server_is_distinguished(name: str, monkeypatch: Patch) -> None:
    modules = SERVERS[name](monkeypatch)
    problem = scaled_operands.problem(1, 40, 128, PAIRS["block, A in rows"])
    operands, _ = scaled_operands.operands(problem)
    for module in modules.values():
        for kernel in vars(module).values():
            if isinstance(kernel, server_kernels.Kernel):
                kernel.fn = lambda A, epilogue: None
    fails(UnavailableError, "needs epilogue, which is not known here", backend(name).list_algorithms, problem, operands)
    experts = server_kernels.VLLM_EXPERTS if name == "vllm" else server_kernels.SGLANG_EXPERTS
    for function in [f for f in vars(modules[experts]) if f.startswith("invoke")]:
        monkeypatch.delattr(modules[experts], function)
    with pytest.raises(UnavailableError, match="of this version has no invoke_fused_moe"):
        backend(name).list_algorithms(grouped((3, 4)), FAMILY.make_inputs(grouped((3, 4)), "cpu"))


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("target", [SM90, GFX942], ids=lambda target: target.name)
@pytest.mark.parametrize(
    "problem",
    [*(replace(DENSE, m=m) for m in (1, 64, 4096)), grouped((64,) * 32, 1536, 2048)],
    ids=lambda problem: problem.key,
)
def test_what_is_tried(name: str, target: Any, problem: Problem) -> None:
    tried = backend(name).list_candidates(problem, target)
    assert (tried[0].block_n, tried[0].block_k) in ((128, 128), (64, 128)) and len(set(tried)) == len(tried) > 16
    assert all(c.backend == name and backend(name).check(c, problem, target) for c in tried)
    assert len({c.tile for c in tried[:48]}) > 2 and len({c.kernel_name for c in tried[:16]}) > 12


@cases(
    ({"block_m": 48}, "block_m must be a power of two"),
    ({"block_k": 256}, "block_k must be a power of two from 16 to 128"),
    ({"num_stages": 0}, "num_stages must be from 1 to 16"),
    ({"group_m": 0}, "group_m must be"),
    ({"num_warps": 64}, "num_warps must be"),
    ({"split_k": 2}, "does not split K"),
    ({"options": (("poll", 1),)}, "has no poll"),
    ({"template": "grouped_tile"}, "stands for another of its kernels"),
)
def test_configs_that_are_no_row(change: dict[str, Any], why: str, /) -> None:
    problem = FAMILY.problem(Problem(16, 256, 512, *matrices("fp8e4m3fn", c="bf16", layout="TN")))
    config = Config("tile", 16, 64, 128, backend="vllm")
    assert backend("vllm").check(config, problem, SM90)
    assert why in backend("vllm").check(replace(config, **change), problem, SM90).reason


@pytest.mark.servers
@pytest.mark.parametrize("name", SERVERS)
def test_the_real_kernels_in_the_interpreter(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"the {name} package is not installed")
    script = ROOT / "tests/support/run_server_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # Triton reads it when it is imported.
    done = subprocess.run(
        [sys.executable, str(script), name], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    if "does not load" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 6
