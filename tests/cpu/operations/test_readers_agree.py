"""What a capture writes of a call with scale factors is what serving looks up for it, over all shapes and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.plugins import dropped
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.operations.batched import BatchOperands, check_shapes, read_batch
from tritongemm.operations.grouped import GroupedOperands, check, problem_of
from tritongemm.operations.scaled import ScaledOperands, check_encoding, read_product
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.search_spaces import loader
from tritongemm.serving.linear_fp8 import _scaled_operands
from tritongemm.serving.tuned_blocks import BlockOperands, _forms
from tritongemm.workloads.capturing.own_calls import OWN
from tritongemm.workloads.capturing.product import BASIC, Product

BF16, SHUFFLED = torch.bfloat16, "e8m0_32x8"


class Kind(NamedTuple):
    """A type of operands, what it is called, the GPU that reads it, and how many of its numbers share a byte."""

    dtype: torch.dtype
    name: str
    target: Target
    packed: int = 1


KINDS = {
    "fp8": Kind(torch.float8_e4m3fn, "fp8e4m3fn", loader.load_target("sm90")),
    "fp8 of gfx942": Kind(torch.float8_e4m3fnuz, "fp8e4m3fnuz", loader.load_target("gfx942")),
    "int8": Kind(torch.int8, "int8", loader.load_target("gfx942")),
    "fp4": Kind(torch.uint8, "fp4e2m1", loader.load_target("gfx950"), 2),
}
SIZES = ((5, 256, 512), (1, 2048, 128), (130, 384, 256), (16, 16, 2048))
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def factors(rows: int, k: int) -> Iterator[Tensor]:
    """Factors of [rows, K] in every shape and layout that some call takes, and in some that none takes."""
    groups, blocks = cdiv(k, 128), cdiv(rows, 128)
    yield from (torch.ones(shape) for shape in ((), (1,), (1, 1), (rows,), (rows, 1), (1, rows)))
    yield from (torch.ones(rows, groups), torch.ones(groups, rows).t(), torch.ones(rows, groups + 3)[:, :groups])
    yield from (torch.ones(groups, cdiv(rows, 4) * 4)[:, :rows].t(), torch.ones(groups, rows + 8)[:, :rows].t())
    yield from (torch.ones(blocks, groups), torch.ones(groups, blocks).t())
    yield from (torch.ones(rows, k // 32).byte(), torch.ones(k // 32, rows).byte().t())
    yield torch.ones(rows, groups).half()


def shuffled(rows: int, k: int) -> Tensor:
    return torch.ones(cdiv(rows, 32) * 32, cdiv(k // 32, 8) * 8, dtype=torch.uint8)


def matrix(kind: Kind, rows: int, k: int) -> Tensor:
    return torch.empty((rows, k // kind.packed), dtype=kind.dtype)


def written(product: Product, order_b: str = "") -> Problem | None:
    """The problem that the row of a captured product is of; None where it is left out."""
    p = product
    assert p.order_b == order_b
    family: Family = registry.get(Family, p.family)
    return None if p.left_out else family.problem(
        p.m, p.n, p.k, p.dtype_a, p.dtype_b, p.dtype_c, row_major_a=p.row_major_a, row_major_b=p.row_major_b,
        bias=p.bias, batch=p.batch, groups=p.groups, order_b=p.order_b or PLAIN, scales=p.scales, shared=p.shared,
    )  # fmt: skip


def compare(call: str, captured: Product | None, served: list[Problem]) -> None:
    assert captured is not None
    found = written(captured)
    assert (found in served) if served else (found is None and "factors" in captured.left_out), (call, found, served)


@every_kind
def test_scaled_mm(kind: Kind) -> None:
    counts = dict.fromkeys((True, False), 0)
    for m, n, k in SIZES:
        a, w = matrix(kind, m, k), matrix(kind, n, k)
        pairs = [(*pair, "") for pair in product(factors(m, k), factors(n, k))]
        for of_a, of_b, layout in (*pairs, (shuffled(m, k), shuffled(n, k), SHUFFLED)):
            try:
                read = read_product(ScaledOperands(a, w, of_a, of_b, scale_layout=layout))
                check_encoding(read, kind.target)
            except InputError:  # the call raises it
                continue
            served = list(read.problems(kind.target))
            (captured,) = OWN["tritongemm.scaled_mm"]("", (a, w, of_a, of_b), {"scale_layout": layout})
            compare(f"{m} {n} {k} {of_a.shape} {of_a.stride()} {of_b.shape} {of_b.stride()}", captured, served)
            counts[bool(served)] += 1
            if not served:
                assert read.why_none(kind.target).startswith("scale factors of A ")
    assert min(counts.values()) > 0 or kind.name == "fp4e2m1", counts


@every_kind
def test_linear_fp8(kind: Kind) -> None:
    for m, n, k in SIZES:
        x, w = torch.empty(m, k, dtype=BF16), matrix(kind, n, k)
        for scale in factors(n, k):
            operands = BlockOperands(x, w, scale, None, None, BF16)
            try:
                usual = _scaled_operands(operands)
                in_blocks = usual.scale_a.shape[-1] == cdiv(k, 128) > 1 and usual.scale_a.dtype == torch.float32
                given = [one for _, one in _forms(operands)] if in_blocks else [usual]
                reads = [read_product(one) for one in given]
                check_encoding(reads[0], kind.target)
            except (InputError, KeyError):  # the call raises it, or a type is not quantised to with powers of two
                continue
            (captured,) = OWN["tritongemm.linear_fp8"]("", (x, w, scale), {})
            served = [problem for read in reads for problem in read.problems(kind.target)]
            compare(f"{m} {n} {k} {scale.shape} {scale.stride()}", captured, served)


@every_kind
def test_scaled_bmm(kind: Kind) -> None:
    def batch(one: Tensor) -> Tensor:
        return one.expand(2, *one.shape) if one.dim() else one

    for m, n, k in SIZES[:3]:
        a, b = matrix(kind, m, k).repeat(2, 1, 1), matrix(kind, n, k).repeat(2, 1, 1).mT
        pairs = [(batch(x), batch(y.t() if y.dim() == 2 else y), "") for x, y in product(factors(m, k), factors(n, k))]
        last = batch(shuffled(m, k)), batch(shuffled(n, k).t()), SHUFFLED
        for of_a, of_b, layout in (*pairs, last):
            try:
                read = read_batch(check_shapes(BatchOperands(a, b, None, BF16, of_a, of_b, layout)))
            except InputError:
                continue
            assert not isinstance(read, Support)
            captured = BASIC["tritongemm::bmm"]("", (a, b, None, BF16, of_a, of_b, layout), {})
            compare(f"{m} {n} {k} {of_a.shape} {of_b.shape}", captured, list(read.readings()))


@every_kind
def test_grouped_mm(kind: Kind) -> None:
    ends = torch.tensor([1, 3], dtype=torch.int32)
    for m, n, k in ((5, 256, 512), (130, 384, 256)):
        a, b = matrix(kind, m, k), matrix(kind, n, k).repeat(2, 1, 1).mT
        pairs = [(x, y.expand(2, *y.shape), "") for x, y in product(factors(m, k), factors(n, k))]
        for of_a, of_b, layout in (*pairs, (shuffled(m, k), shuffled(n, k).expand(2, -1, -1), SHUFFLED)):
            operands = GroupedOperands(a, b, ends, of_a, of_b, BF16, layout)
            try:
                check(operands)
            except InputError:
                continue
            problem = problem_of(operands)
            args = (a, b, ends, of_a, of_b, BF16)
            (captured,) = OWN["tritongemm.grouped_mm"]("", args, {"scale_layout": layout})
            compare(f"{m} {n} {k} {of_a.shape}", captured, [] if isinstance(problem, Support) else [problem])


def test_factors_with_padded_rows_are_captured_and_served() -> None:
    x, weight = torch.randn(5, 512), torch.empty(256, 512, dtype=torch.float8_e4m3fn)
    q, scale = tritongemm.quantize(x, "block", layout="tma")
    assert scale.stride() == (1, 8)
    (captured,) = OWN["tritongemm.scaled_mm"]("", (q, weight, scale, torch.ones(2, 4)), {})
    assert captured is not None and (captured.family, captured.scales) == ("a8w8_blockscale", "block_tma")
    (served,) = read_product(ScaledOperands(q, weight, scale, torch.ones(2, 4))).problems(KINDS["fp8"].target)
    assert served == written(captured) and served.operands["scale_a"].shape == (4, 8)
    one = BatchOperands(q[None], weight.mT[None], None, BF16, scale[None], torch.ones(1, 4, 2).mT.contiguous().mT)
    batch = read_batch(check_shapes(one))
    assert not isinstance(batch, Support) and served in batch.readings() and batch.moved(served) == {}


PLUGIN = '''
"""Family: int8 with a power of two for each 32 numbers along K."""

from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily


class IntegerPowers(StandardFamily):
    """C = (A * scale_a) @ (B * scale_b)."""

    summary = "int8 with a power of two for each 32 along K"

    def scaling(self, dtype_a, dtype_b):
        """Powers of two."""
        return GRANULARITIES["mx"]

    def _types(self, problem):
        return SUPPORTED if problem.dtype_a == problem.dtype_b == "int8" else Support("it multiplies int8")

    def tolerance(self, problem):
        """Rounding."""
        return problem.c.epsilon
'''


def test_a_plugin_is_captured_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is all there is."""
    m, n, k = 5, 256, 512
    kind = KINDS["int8"]
    operands: tuple[Any, ...] = (matrix(kind, m, k), matrix(kind, n, k), torch.ones(m, k // 32).byte())
    operands += (torch.ones(n, k // 32).byte(),)
    path = tmp_path / "int8_powers.py"
    path.write_text(PLUGIN)

    def read() -> tuple[list[Problem], Product]:
        (captured,) = OWN["tritongemm.scaled_mm"]("", operands, {})
        assert captured is not None
        return list(read_product(ScaledOperands(*operands)).problems(kind.target)), captured

    assert not read()[0] and "no family" not in read()[1].family
    with dropped(Family, path, tmp_path, monkeypatch):
        served, captured = read()
        assert [problem.family for problem in served] == ["int8_powers"] and served == [written(captured)]
