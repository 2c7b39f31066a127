"""The DeepGEMM backend, against a stand-in of the package that checks what the real one checks, and computes."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import raising, scaled_operands
from tests.support.fakes import scaled_products
from tests.support.fakes.blaslt_library import NO_CAPTURE
from tests.support.nouns import Groups, Patch, Record, Support, UnavailableError, fails, loader, registry
from tests.support.scaled_operands import PAIRS
from tritongemm.backends.deepgemm import package, served
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.numerics import grouped
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.tune import roster

BACKEND = registry.get(LibraryBackend, "deepgemm")
SM90, SM100 = map(loader.load_target, ("sm90", "sm100"))
GROUPED = [f"m_grouped_{dtype}_gemm_nt_{form}" for dtype in ("fp8", "bf16") for form in ("contiguous", "masked")]
BLOCKS = ["block, A in groups", "block, A in rows", "block, A padded"]


@pytest.fixture
def deep_gemm(monkeypatch: Patch) -> Iterator[Any]:
    module: Any = ModuleType("deep_gemm")
    module.__spec__ = ModuleSpec("deep_gemm", None)
    module.__version__, module.overlaps, module.switched = "2.6.1", False, []
    for name in ("fp8_gemm_nt", "bf16_gemm_nt", *GROUPED):
        setattr(module, name, getattr(scaled_products, name))
    module.get_mk_alignment_for_contiguous_layout = lambda: 128
    module.get_pdl = lambda: module.overlaps

    def set_pdl(on: bool) -> None:
        module.overlaps = on
        module.switched.append(on)

    module.set_pdl = set_pdl
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    package.load.cache_clear()
    yield module
    package.load.cache_clear()


@pytest.mark.parametrize("pair", BLOCKS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 128), (33, 264, 384), (64, 128, 512)])
def test_block_scales_are_as_the_copy_engine_reads_them(deep_gemm: Any, pair: str, m: int, n: int, k: int) -> None:
    problem = scaled_operands.problem(m, n, k, PAIRS[pair])
    operands, exact = scaled_operands.operands(problem)
    assert BACKEND.available() and BACKEND.supports(problem, SM90) and BACKEND.version() == "2.6.1"
    configs = BACKEND.list_algorithms(problem, operands)
    assert [c.option("overlap") for c in configs] == [0, 1] and configs[0].template == "fp8_gemm_nt"
    for config in (None, *configs):
        call = BACKEND.operation(problem, operands, config)
        assert call is not None
        operands["c"].fill_(float("nan"))
        call()
        assert deviation(operands["c"], exact) < 2**-7
    assert deep_gemm.switched and not deep_gemm.overlaps  # as it was before


def test_bf16_in_any_layout_and_padded_groups_as_they_are(deep_gemm: Any) -> None:
    family = registry.get(Family, "dense")
    for rows_a in (True, False):
        for rows_b in (True, False):
            problem = Problem(40, 48, 64, *matrices("bf16", layout="NT"[rows_a] + "NT"[rows_b]))
            operands = family.make_inputs(problem, "cpu") | {"c": torch.empty(40, 48, dtype=torch.bfloat16)}
            assert BACKEND.operation(problem, operands) is not None and BACKEND.supports(problem, SM90)
            assert deviation(operands["c"], family.reference(problem, operands)) < family.tolerance(problem)
    problem = family.problem(Problem(30, 16, 64, *matrices("bf16", layout="TN"), groups=Groups(3)))
    operands = family.make_inputs(problem, "cpu") | {"c": torch.full((30, 16), float("nan"), dtype=torch.bfloat16)}
    call: Any = BACKEND.operation(problem, operands)
    padded = call()
    assert padded.shape == (384, 16) and bool(operands["c"].isnan().all())
    rows = torch.cat([padded[first : first + 10] for first in (0, 128, 256)])
    assert deviation(rows, family.reference(problem, operands)) < family.tolerance(problem)


@pytest.mark.parametrize("dtype", ["bf16", "fp8e4m3fn"])
@pytest.mark.parametrize("counts", [(5, 0, 130, 1), (128, 256, 0, 128)])
@pytest.mark.parametrize("room", [0, 258])
def test_groups_of_rows(deep_gemm: Any, dtype: str, counts: tuple[int, ...], room: int) -> None:
    family = registry.get(Family, "a8w8_blockscale" if dtype != "bf16" else "dense")
    problem = family.problem(
        Problem(
            sum(counts), 264, 256, *matrices(dtype, c="bf16", layout="TN"),
            groups=Groups(len(counts), room=room, spread="captured", counts=counts),
        )
    )  # fmt: skip
    assert BACKEND.supports(problem, SM90)
    operands = family.make_inputs(problem, "cpu")
    operands["c"] = torch.full(problem.operands["c"].shape, float("nan"), dtype=torch.bfloat16)
    config, *_ = BACKEND.list_algorithms(problem, operands)
    assert config.template in GROUPED
    call = BACKEND.operation(problem, operands, config)
    assert call is not None
    operands["c"].fill_(float("nan"))
    call()
    c, exact = grouped.written(problem, operands["c"], family.reference(problem, operands))
    assert deviation(c, exact) < family.tolerance(problem)
    assert not BACKEND.load(Record(problem, "sm90", config, "deepgemm", 1e-6, 0.0, "events"), 0, NO_CAPTURE)


def test_what_it_lacks_is_refused_with_the_number_that_decides() -> None:
    block = scaled_operands.problem(8, 32, 256, PAIRS["block, A in rows"])
    for problem, said in (
        (replace(block, c=Operand("fp16")), "e4m3fn into bf16"),
        (replace(block, n=20), "rows of C take 40 bytes"),
        (replace(block, b=block.b._replace(row_major=True)), "contiguous along K"),
        (replace(block, bias="n"), "adds no bias"),
        (replace(block, batch=2), "batched"),
        (scaled_operands.problem(8, 32, 256, PAIRS["row"]), "can't apply scale_a in the epilogue"),
        (scaled_operands.problem(8, 32, 256, PAIRS["group, B in rows"]), "128 x 128 of B"),
        (Problem(8, 32, 64), "bf16 or fp8, not fp16"),
        (Problem(8, 32, 60, *matrices("bf16", layout="TN")), "rows of A take 120 bytes"),
    ):
        assert said in BACKEND.supports(problem, SM90).reason
    assert "for sm90, not sm100" in BACKEND.supports(block, SM100).reason
    assert roster.compile_limit_s("deepgemm")  # it compiles for seconds, so it races where it is named


def test_a_package_that_is_missing_or_broken_says_why(deep_gemm: Any, monkeypatch: Patch) -> None:
    del deep_gemm.fp8_gemm_nt
    assert "built without its kernels" in BACKEND.available().reason
    monkeypatch.setattr(
        "importlib.import_module", raising(ImportError("libnvrtc.so.13: cannot open shared object file\nand more"))
    )
    assert BACKEND.available().reason.endswith("does not load: libnvrtc.so.13: cannot open shared object file")
    monkeypatch.delitem(sys.modules, "deep_gemm")
    assert "is not installed" in BACKEND.available().reason
    fails(UnavailableError, "", package.load)


def test_what_the_package_refuses_is_none_and_a_lost_device_is_not_hidden(deep_gemm: Any) -> None:
    problem = scaled_operands.problem(8, 32, 256, PAIRS["block, A in rows"])
    operands, _ = scaled_operands.operands(problem)
    deep_gemm.fp8_gemm_nt = raising(RuntimeError("Assertion error (csrc/apis/gemm.hpp:99): m == m_"))
    assert BACKEND.operation(problem, operands) is None and BACKEND.list_algorithms(problem, operands) == []
    deep_gemm.fp8_gemm_nt = raising(torch.OutOfMemoryError("no memory"))
    fails(torch.OutOfMemoryError, "", BACKEND.operation, problem, operands)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_product_is_served_at_any_addresses(deep_gemm: Any, monkeypatch: Patch, overlap: int) -> None:
    """By a call of the package here, as this machine has no driver that says what a graph holds."""
    monkeypatch.setattr(served, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(served, "_on_stream", lambda stream, place: nullcontext())
    problem = scaled_operands.problem(8, 272, 384, PAIRS["block, A in groups"])
    made = [scaled_operands.operands(problem, seed=seed) for seed in range(2)]
    config = BACKEND.list_algorithms(problem, made[0][0])[overlap]
    loaded = BACKEND.load(Record(problem, "sm90", config, "deepgemm", 1e-6, 0.0, "events"), 0, NO_CAPTURE)
    assert isinstance(loaded, served.LoadedProduct) and not loaded.captured and loaded.bytes("workspace") == 0
    launches = [loaded.prepare(NO_CAPTURE) for _ in made]
    for launch, (operands, _) in zip(launches, made, strict=True):
        for name in ("a", "b", "c", "scale_a", "scale_b"):
            launch.set_address(name)(operands[name].data_ptr())
    for launch, (operands, exact) in zip(launches, made, strict=True):
        launch.launch(0)
        assert deviation(operands["c"], exact) < 2**-7


def test_scales_that_would_be_copied_are_not_served(deep_gemm: Any) -> None:
    for pair, m, said in (
        ("block, A in rows", 8, "scale_a as [2, 8] in memory, not [8, 2]"),
        ("block, A in groups", 9, "scale_a as [2, 12] in memory, not [2, 9]"),
    ):
        problem = scaled_operands.problem(m, 32, 256, PAIRS[pair])
        operands, _ = scaled_operands.operands(problem)
        (config, *_) = BACKEND.list_algorithms(problem, operands)
        refused = BACKEND.load(Record(problem, "sm90", config, "deepgemm", 1e-6, 0.0, "events"), 0, NO_CAPTURE)
        assert isinstance(refused, Support) and said in refused.reason
    assert served._reads_as_they_are(scaled_operands.problem(9, 32, 256, PAIRS["block, A padded"]))
