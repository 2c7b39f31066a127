from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import (
    GEMV,
    GEMV_POLLED,
    GEMV_ROW,
    GFX942,
    PLAIN,
    POLLED,
    SM90,
    SPLIT,
    SWAPPED,
    TMA,
    TMA_POLLED,
    TMA_SWAPPED,
)
from tests.support.nouns import Config, Defaults, Family, InputError, KernelBackend, Problem, each, matrices, registry
from tests.support.tables import apart, heavy
from tritongemm.cli import tune
from tritongemm.codegen import geometry, render, template_facts
from tritongemm.workloads import sizes

POINTERS = (PLAIN, SPLIT, POLLED, SWAPPED, GEMV, GEMV_ROW, GEMV_POLLED)
DESCRIBED = (TMA, TMA_POLLED, TMA_SWAPPED)
ODD = Problem(17, 19, 21, *matrices(layout="TN"), batch=2)


@apart(("", True, False, "n"), ("", False, True, "m"), ("a", True, False, "n"), ("b", False, True, "m"))
def test_pointers_at_odd_sizes(shared: str, row_a: bool, row_b: bool, bias: str, /, interpreted: Interpreted) -> None:
    problem = replace(
        ODD, bias=bias, a=ODD.a._replace(shared=shared == "a"), b=ODD.b._replace(shared=shared == "b")
    ).stored(row_a, row_b)
    interpreted.check(problem, (SPLIT, GEMV) if shared else POINTERS, GFX942)


@apart(("", True, False, 24), ("", False, True, 32), ("a", False, True, 32), ("b", True, False, 24))
def test_descriptors_cover_a_batch(shared: str, row_a: bool, row_b: bool, k: int, /, interpreted: Interpreted) -> None:
    """M is no multiple of a tile: what a block reads of the next product's rows must not reach C."""
    m = 19 if row_a else 24
    problem = Problem(m, 24, k, *matrices(layout="NT"[row_a] + "NT"[row_b], shared=shared), batch=2)
    assert all(registry.get(KernelBackend, "triton").check(config, problem, SM90) for config in DESCRIBED)
    interpreted.check(problem, (TMA_POLLED,) if shared else DESCRIBED, SM90)


@pytest.mark.parametrize(("dtypes", "shared"), [(("int8", "int8", "int32"), ""), (("bf16",) * 3, "b")])
def test_dtypes(interpreted: Interpreted, dtypes: tuple[str, str, str], shared: str) -> None:
    problem = Problem(17, 19, 21, *matrices(*dtypes, layout="TN", shared=shared), batch=2)
    interpreted.check(problem, (SPLIT, GEMV), GFX942)


@pytest.mark.parametrize(("dtype", "shared"), [("int8", ""), ("int8", "b"), ("fp8e4m3fnuz", ""), ("fp8e4m3fnuz", "a")])
def test_scales_and_biases_of_each_product(interpreted: Interpreted, dtype: str, shared: str) -> None:
    family: Family = registry.get(Family, "a8w8")
    problem = family.problem(
        Problem(17, 19, 21, *matrices(dtype, c="fp16", layout="TN", shared=shared), bias="n", batch=2)
    )
    interpreted.check(problem, (SPLIT,) if shared else (SPLIT, GEMV), GFX942)


BLOCKS = (
    Config("tile", 16, 64, 128, split_k=2),
    Config("tile", 32, 64, 64, 2, 3, options=(("poll", 1), ("swap_ab", 1))),
    Config("gemv", 1, 128, 256),
    Config("gemv", 4, 128, 128, split_k=2),
    Config("tma", 16, 64, 128, 2, 2, options=(("swap_ab", 1),)),
)


@apart(heavy("block_tma", "fp8e4m3fn", ""), ("block_rows", "int8", "a"), heavy("group", "fp8e4m3fn", "b"))
def test_scales_along_k_of_each_product(scales: str, dtype: str, shared: str, /, interpreted: Interpreted) -> None:
    """Factors in another product's place would be off by powers of two."""
    family: Family = registry.get(Family, "a8w8_blockscale")
    problem = family.problem(
        Problem(9, 136, 272, *matrices(dtype, c="fp32", layout="TN", shared=shared), bias="n", batch=2), scales
    )
    assert family.supports(problem, SM90)
    interpreted.check(problem, BLOCKS[::2] if shared else BLOCKS, SM90, 0.3)


@pytest.mark.parametrize("target", [heavy("sm90"), "gfx942"])
def test_a_batch_is_tuned_and_read_back(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out.yaml"
    size = ["-m", "16", "-n", "32", "-k", "64", "-col_b", "-dtype_a", "bf16", "--batch", "16", "--shared", "b"]
    assert tune.main([*size, "--target", target, "--budget", "1", "--num_threads", "1", "-o", str(out)]) == 0
    (row,) = sizes.from_file(out, Defaults())
    wanted = Problem(16, 32, 64, *matrices("bf16", layout="TN", shared="b"), batch=16)
    assert row.problem == wanted and row.record is not None
    assert row.record.verified.endswith(" in the interpreter at 16x32x64")
    assert (row.record.error or 0.0) <= (row.record.tolerance or 0.0)
    path = tmp_path / "sizes.yaml"
    path.write_text(
        "- {M: 4, N: 8, K: 16}\n- {M: 4, N: 8, K: 16, batch: 2}\n- {M: 5, N: 8, K: 16, batch: 2, shared: a}\n"
    )
    keys = [r.problem.key for r in sizes.from_file(path, Defaults.of(shared="b", batch=3))]
    assert keys == ["4x8x16_fp16_TT_batch3_sharedb", "4x8x16_fp16_TT_batch2", "5x8x16_fp16_TT_batch2_shareda"]


def test_what_a_batch_takes() -> None:
    one, batch = replace(ODD, batch=1, bias="n"), replace(ODD, bias="n")
    assert (batch.flops, batch.bytes) == (2 * one.flops, 2 * one.bytes)
    for name, size in {"a": 17 * 21 * 2, "b": 21 * 19 * 2}.items():
        shared = replace(batch, a=batch.a._replace(shared=name == "a"), b=batch.b._replace(shared=name == "b"))
        assert shared.bytes == batch.bytes - size and shared.operands[name].lead == ()
        assert shared.key == f"17x19x21_fp16_TN_biasn_batch2_shared{name}"
        assert Problem.from_json(shared.to_json()) == shared
    assert {name: spec.lead for name, spec in batch.operands.items()} == dict.fromkeys(("a", "b", "c", "bias"), (2,))
    ours = [geometry.geometry(SPLIT, p, 1) for p in (one, batch)]
    assert ours[1].grid == (*ours[0].grid[:2], 2) and ours[1].workspace_bytes == 2 * ours[0].workspace_bytes
    assert ours[1].semaphore_bytes == 2 * ours[0].semaphore_bytes > 0


@each(("shared", "batch"), [("c", 2), ("a", 1)])
def test_what_no_batch_shares(shared: str, batch: int) -> None:
    with pytest.raises(InputError, match="shared"):
        Problem.from_json(ODD.to_json() | {"batch": batch, "shared": shared})


@each("template", ["tile", "gemv", "tma"])
def test_a_single_product_has_nothing_of_a_batch(template: str) -> None:
    assert "product" not in render.kernel_source(replace(ODD, batch=1), template, SM90)
    assert "product * batch_c" in render.kernel_source(ODD, template, SM90)
    sizes = {
        render.kernel_source(
            replace(ODD, batch=b, a=ODD.a._replace(shared=s == "a"), b=ODD.b._replace(shared=s == "b")), template, SM90
        )
        for b, s in ((2, ""), (5, "b"))
    }
    assert len(sizes) == 1, "one binary for every batch, shared or not"


def test_what_is_refused_is_named() -> None:
    triton = registry.get(KernelBackend, "triton")
    by_k = replace(ODD, m=24, k=40, a=ODD.a._replace(row_major=False))
    assert "block_k 16 does not divide K 40" in triton.check(TMA, by_k, SM90).reason
    many = triton.check(PLAIN, Problem(1, 16, 16, batch=65536), SM90)
    assert "65536 workgroups along z, of which a launch has 1 to 65535" in many.reason
    deep = Problem(1 << 20, 16, 16, *matrices(layout="TN"), batch=1 << 12)
    assert "stored rows of a batch of A are beyond a descriptor's 32 bits" in triton.check(TMA, deep, SM90).reason
    assert "does not run template persistent" in triton.check(Config("persistent", 16, 32, 32), ODD, SM90).reason
    assert {n for n in template_facts.names() if "batched" in template_facts.kernel_template(n).kinds} == {
        *("fragments", "gemv", "tile", "tma")
    }
    shuffled = replace(ODD, b=ODD.b._replace(order="shuffled_16x16"))
    assert "of a batch are in rows or columns" in registry.get(Family, "dense").supports(shuffled, GFX942).reason
