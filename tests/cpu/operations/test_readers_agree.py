"""What a capture writes of a call with scale factors is what serving looks up for it, over all shapes and layouts."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.nouns import Family, Groups, InputError, Patch, Problem, Support, Target, load_target, registry
from tests.support.plugins import dropped
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import PLAIN
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.operations.batched import BATCHED, BatchOperands
from tritongemm.operations.checks import check_encodings
from tritongemm.operations.contract import ProductOperation
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.quantised_layer import QUANTISED_LAYER, LayerOperands
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.serving.linear_fp8 import _block_operands, _forms, _scaled_operands
from tritongemm.workloads.capturing.product import Product, of_own

BF16, SHUFFLED = torch.bfloat16, "e8m0_32x8"


class Kind(NamedTuple):
    dtype: torch.dtype
    name: str
    target: Target
    packed: int = 1


KINDS = {
    "fp8": Kind(torch.float8_e4m3fn, "fp8e4m3fn", load_target("sm90")),
    "fp8 of gfx942": Kind(torch.float8_e4m3fnuz, "fp8e4m3fnuz", load_target("gfx942")),
    "int8": Kind(torch.int8, "int8", load_target("gfx942")),
    "fp4": Kind(torch.uint8, "fp4e2m1", load_target("gfx950"), 2),
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
    assert p.b.order == (order_b or PLAIN)
    if p.left_out:
        return None
    groups = Groups(p.groups) if p.groups > 1 else None
    family: Family = registry.get(Family, p.family)
    return family.problem(Problem(p.m, p.n, p.k, p.a, p.b, p.c, p.bias, p.batch, groups), p.scales)


def served_by(operation: ProductOperation, given: Any, target: Target) -> tuple[Problem, ...]:
    """The problems that serving looks up on a GPU."""
    reading = operation.read(operation.check(given))
    assert not isinstance(reading, Support), reading
    check_encodings(reading.tensors, lambda: target)
    assert bool(reading.problems) != reading.why_none.startswith("scale factors of A ")
    return tuple(p for p in reading.problems if registry.get(Family, p.family).supports(p, target))


def compare(call: str, given: Any, served: tuple[Problem, ...]) -> bool:
    (captured,) = of_own(f"tritongemm.{call}", given, {})
    found = written(captured)
    case = [(tuple(one.shape), one.stride()) for one in given if isinstance(one, Tensor)]
    assert (found in served) if served else (found is None and "factors" in captured.left_out), (case, found, served)
    return bool(served)


def calls(kind: Kind, operation: ProductOperation) -> Iterator[Any]:
    for m, n, k in SIZES[: None if operation is SCALED and kind.name == "fp8e4m3fn" else 1]:
        a, w, pairs = matrix(kind, m, k), matrix(kind, n, k), [*product(factors(m, k), factors(n, k))]
        last = shuffled(m, k), shuffled(n, k)
        if operation is SCALED:
            yield from (ScaledOperands(a, w, *pair) for pair in pairs)
            yield ScaledOperands(a, w, *last, scale_layout=SHUFFLED)
        elif operation is GROUPED:
            ends, b = torch.tensor([1, 3], dtype=torch.int32), w.repeat(2, 1, 1).mT
            yield from (GroupedOperands(a, b, ends, x, y.expand(2, *y.shape), BF16) for x, y in pairs)
            yield GroupedOperands(a, b, ends, last[0], last[1].expand(2, -1, -1), BF16, SHUFFLED)
        else:
            a, b = a.repeat(2, 1, 1), w.repeat(2, 1, 1).mT
            for (x, y), layout in (*((pair, "") for pair in pairs), (last, SHUFFLED)):
                turned = y.t() if y.dim() == 2 else y
                of_a, of_b = (one.expand(2, *one.shape) if one.dim() else one for one in (x, turned))
                yield BatchOperands(a, b, None, BF16, of_a, of_b, layout)


@every_kind
@pytest.mark.parametrize("operation", [SCALED, BATCHED, GROUPED], ids=lambda operation: operation.name)
def test_what_is_captured_is_served(operation: ProductOperation, kind: Kind) -> None:
    counts = dict.fromkeys((True, False), 0)
    for given in calls(kind, operation):
        try:
            served = served_by(operation, given, kind.target)
        except InputError:  # the call raises it
            continue
        counts[compare(operation.name, given, served)] += 1
    assert counts[True] and (counts[False] or operation is GROUPED or kind.name == "fp4e2m1"), counts


EVERY_WAY = frozenset(of_a for of_a, _ in GRANULARITIES.values())


@every_kind
def test_a_quantised_layer_is_captured_as_its_product(kind: Kind) -> None:
    for m, n, k in SIZES:
        x, w = torch.empty(m, k, dtype=BF16), matrix(kind, n, k)
        for scale in factors(n, k):
            try:
                checked = QUANTISED_LAYER.check(LayerOperands(x, w, scale))
                operands = _block_operands(checked)
                given = (
                    [one for _, one in _forms(operands, EVERY_WAY)]
                    if checked.granularity == "block"
                    else [_scaled_operands(checked)]
                )
                served = [p for one in given for p in served_by(SCALED, one, kind.target)]
            except (InputError, KeyError):  # the call raises it, or a type is not quantised to with powers of two
                continue
            compare("linear_fp8", (x, w, scale), tuple(served))


def test_factors_with_padded_rows_are_captured_and_served() -> None:
    x, weight = torch.randn(5, 512), torch.empty(256, 512, dtype=torch.float8_e4m3fn)
    q, scale = tritongemm.quantize(x, "block", layout="tma")
    assert scale.stride() == (1, 8)
    given = ScaledOperands(q, weight, scale, torch.ones(2, 4))
    (captured,) = of_own("tritongemm.scaled_mm", given, {})
    assert (captured.family, captured.scales) == ("a8w8_blockscale", "block_tma")
    (served,) = served_by(SCALED, given, KINDS["fp8"].target)
    assert served == written(captured) and served.operands["scale_a"].shape == (4, 8)
    one = BatchOperands(q[None], weight.mT[None], None, BF16, scale[None], torch.ones(1, 4, 2).mT.contiguous().mT)
    batch = BATCHED.read(BATCHED.check(one))
    assert not isinstance(batch, Support) and served in batch.problems and batch.moved(served) == {}


PLUGIN = '''
"""Family: int8 with a power of two for each 32 numbers along K."""

from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily


class IntegerPowers(StandardFamily):
    """C = (A * scale_a) @ (B * scale_b)."""

    summary = "int8 with a power of two for each 32 along K"

    def scalings(self, dtype_a, dtype_b):
        """Powers of two."""
        return (GRANULARITIES["mx"],)

    def _types(self, problem):
        return SUPPORTED if problem.a.dtype == problem.b.dtype == "int8" else Support("it multiplies int8")

    def tolerance(self, problem):
        """Rounding."""
        return problem.c.epsilon
'''


def test_a_plugin_is_captured_and_served(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its file is all there is."""
    m, n, k = 5, 256, 512
    kind = KINDS["int8"]
    operands: tuple[Any, ...] = (matrix(kind, m, k), matrix(kind, n, k), torch.ones(m, k // 32).byte())
    operands += (torch.ones(n, k // 32).byte(),)
    path = tmp_path / "int8_powers.py"
    path.write_text(PLUGIN)

    def read() -> tuple[tuple[Problem, ...], Product]:
        (captured,) = of_own("tritongemm.scaled_mm", operands, {})
        return served_by(SCALED, ScaledOperands(*operands), kind.target), captured

    assert not read()[0] and "no family" not in read()[1].family
    with dropped(Family, path, tmp_path, monkeypatch):
        served, captured = read()
        assert [problem.family for problem in served] == ["int8_powers"] and served == (written(captured),)
