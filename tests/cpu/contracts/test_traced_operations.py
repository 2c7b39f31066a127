"""Every public product under torch.compile, torch.func, autocast and tracers, with fake tensors and on meta."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tritongemm
from tests.support.linear_layers import StandInKernel, stand_in_device
from tests.support.nouns import InputError, Patch, cases, each, heavy, refuses
from tests.support.operation_calls import CALLS, PLAIN, SCALED, B, Call, K, N, Rows, parts
from tests.support.served_region import Graphs
from tritongemm.operations import contract, scaled
from tritongemm.serving.launching import OperandCall

M, FP8, ONE = 5, torch.float8_e4m3fn, torch.ones
NUMBERS = {rows: Rows(rows, wide=torch.float32) for rows in (M, 2 * M)}
OPERATIONS = {name for one in contract.every() for name in (one.name, *one.calls)}
OWN = sorted(OPERATIONS | {"quantize"})
OF_GROUPS = [name for name in CALLS if name.startswith(("grouped_mm", "fused_moe"))]
# What has gradients, and the places of the operands that want one.
TRAINED = {
    "mm": (0, 1, 2), "bmm": (0, 1, 2), "scaled_mm rows": (2, 3, 4), "scaled_bmm rows": (2, 3), "grouped_mm": (0, 1),
    "grouped_mm masked": (0, 1), "grouped_mm rows": (3, 4), "fused_moe": (0, 1, 2, 3), "linear_fp8 rows": (3,),
}  # fmt: skip
CHECKED = ("mm", "scaled_mm int8", "fused_moe")  # in the quick set too: each takes half a second
# What is traced as others are, and only computed otherwise.
SAME_GRAPH = ("columns", "one factor", "M-major", "int8", "mm fp8", "rows of rows", "a16w16 scaled", "tensor", "_CK",
              "masked rows", "bpreshuffle", "moe rows", "fp4", "batched_gemm_a8w8")  # fmt: skip
APART = ("mm", "scaled_mm rows", "scaled_bmm rows", "grouped_mm", "fused_moe", "linear_fp8 rows")


def call_of(name: str, rows: int = M) -> Call:
    return CALLS[name](NUMBERS[rows])


class Operations(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tritongemm":
            self.called.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [*OWN, "names of AITER"])
def test_one_graph_serves_any_number_of_rows(function: str) -> None:
    names = [
        name
        for name in CALLS
        if not name.endswith(SAME_GRAPH)
        and (name.split()[0] if name.split()[0] in OWN else "names of AITER") == function
    ]
    calls = [call_of(name) for name in names]
    graphs = Graphs("aot_eager" if function == "grouped_mm" else "eager")

    def compute(given: list[list[Tensor]]) -> list[Any]:
        return [call(*tensors) for call, tensors in zip(calls, given, strict=True)]

    own = names[0].split()[0] in {*OPERATIONS, "quantize"}
    compiled = torch.compile(compute, fullgraph=True, dynamic=own, backend=graphs)
    for rows in [*NUMBERS][: 1 + own]:  # the others are made of these
        given = [call_of(name, rows).tensors for name in names]
        for name, found, wanted in zip(names, compiled(given), compute(given), strict=True):
            for one, other in zip(parts(found), parts(wanted), strict=True):
                torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2, msg=name)
    assert len(graphs) == 1 and sum("tritongemm." in str(target) for target in graphs[0]) == len(names), graphs


@each("name", CALLS)
def test_results_have_their_shapes_without_numbers(name: str) -> None:
    call = call_of(name)
    wanted = [(t.shape, t.dtype, t.stride()) for t in parts(call())]
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, call.tensors))
    assert [(t.shape, t.dtype, t.stride()) for t in parts(fake)] == wanted
    meta = call(*(t.to("meta") for t in call.tensors))
    assert [(t.shape, t.dtype) for t in parts(meta)] == [one[:2] for one in wanted]


@pytest.mark.parametrize("name", OF_GROUPS)
def test_it_gives_the_same_where_tensors_are_functional(name: str) -> None:
    """Such a tensor has no memory whose numbers could be read: the ends of groups are those of what it wraps."""
    call = call_of(name)
    wanted = call()
    for remove in ("mutations", "mutations_and_views"):
        found = torch.func.functionalize(call, remove=remove)(*call.tensors)
        assert found.dtype == wanted.dtype and (found - wanted).double().norm() <= 1e-5 * wanted.double().norm()
    graph = make_fx(torch.func.functionalize(call), tracing_mode="symbolic")(*call.tensors)
    ours = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("tritongemm.")]
    assert ours == [f"tritongemm.{call.name}.default"]
    torch.testing.assert_close(graph(*call.tensors), wanted, rtol=1e-3, atol=1e-3)


def test_ends_of_groups_are_read_and_memory_for_another_result_refused() -> None:
    call = call_of("grouped_mm")
    a, b, _ = call.tensors

    def change(ends: Tensor) -> Tensor:
        ends = ends.clone()
        ends[0].add_(1)
        return call(a, b, ends)

    before, after = (torch.tensor([first, 3, 5], dtype=torch.int32) for first in (1, 2))
    assert torch.equal(torch.func.functionalize(change)(before), call(a, b, after))
    with FakeTensorMode(), pytest.raises(InputError, match=r"out is torch.float32 \(2, 5, 49\)"):
        tritongemm.bmm(ONE(2, 5, 8), ONE(2, 8, 48), out=ONE(2, 5, 49))
    with FakeTensorMode(), pytest.raises(InputError, match="powers of two can be in rows, e8m0_32x8"):
        torch.ops.tritongemm.quantize(ONE(5, 64), "mx", FP8, "spiral")


def loss_of(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of the operands that want a gradient, and these."""
    call, places = call_of(name), TRAINED[name]

    def loss(*leaves: Tensor) -> Tensor:
        given = list(call.tensors)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf
        return call(*given).float().square().mean()

    return loss, [call.tensors[place].clone().requires_grad_() for place in places]


@pytest.mark.heavy
def test_gradients_are_the_same_compiled_or_refused() -> None:
    """Activations are quantised, so that theirs would be zero."""
    losses, leaves = zip(*map(loss_of, TRAINED), strict=True)
    flat = [leaf for of_one in leaves for leaf in of_one]

    def together(given: tuple[list[Tensor], ...]) -> Tensor:
        return torch.stack([loss(*of_one) for loss, of_one in zip(losses, given, strict=True)]).sum()

    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(together, backend="aot_eager", fullgraph=True)(leaves), flat)
    wanted = torch.autograd.grad(together(leaves), flat)
    assert all(bool(one.any()) for one in wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    x = torch.randn(M, K).requires_grad_()
    torch._dynamo.reset()
    layer = call_of("linear_fp8 rows")
    result = torch.compile(lambda a: layer(a, *layer.tensors[1:]), backend="aot_eager")(x)
    refuses(r"linear_fp8 has no gradient .* torch.no_grad\(\)", result.sum().backward)
    pair = torch.compile(lambda a: tritongemm.quantize(a, "row"), backend="aot_eager", fullgraph=True)(x)
    assert not any(one.requires_grad for one in pair)


@each("name", [name for name in TRAINED if name in OF_GROUPS])
def test_gradients_are_the_same_functional(name: str) -> None:
    loss, leaves = loss_of(name)
    wanted, every = torch.autograd.grad(loss(*leaves), leaves), tuple(range(len(leaves)))
    given = [leaf.detach() for leaf in leaves]
    inside = torch.func.functionalize(torch.func.grad(loss, every))(*given)
    outside = torch.func.grad(torch.func.functionalize(loss), every)(*given)
    torch.testing.assert_close((tuple(inside), tuple(outside)), (wanted, wanted), rtol=1e-3, atol=1e-3)


OWN_CALLS = [n for n in PLAIN | SCALED if n.split()[0] in OPERATIONS and "out" not in n]


@pytest.mark.parametrize("name", [n if n in CHECKED else heavy(n) for n in OWN_CALLS])
def test_pytorch_finds_no_fault_with_the_operation(name: str) -> None:
    """Its schema, what fake tensors give, and AOTAutograd; also of the form that has gradients."""
    call = call_of(name)
    with Operations() as operations:
        call()
    ((plain, arguments),) = operations.called or [(getattr(torch.ops.tritongemm, call.name).default, call.given)]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(one.is_floating_point() and one.element_size() == 1 for one in call.tensors):
        checks.remove("test_schema")  # it multiplies copies of operands, which PyTorch does not do in fp8
    torch.library.opcheck(plain, arguments, test_utils=checks)
    if name in OF_GROUPS:
        trained = getattr(torch.ops.tritongemm, f"{call.name}_with_gradients").default
        places = [id(call.tensors[place]) for place in TRAINED.get(name, ())]
        wanting = (one.clone().requires_grad_() if id(one) in places else one for one in arguments)
        torch.library.opcheck(trained, tuple(wanting), test_utils=checks)


@pytest.mark.parametrize("name", APART)
def test_operands_that_are_apart_are_refused(name: str) -> None:
    """A tracer sees no check of the call itself, and what is compiled has no numbers on meta."""
    call = call_of(name)
    a, b, *others = call.tensors
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"operands are on cpu and meta; move them|weight is on meta, x on cpu"):
        torch.compile(lambda: call(a, b.to("meta"), *others), backend="eager", fullgraph=True)()


@pytest.mark.parametrize(("granularity", "layout"), [("row", "rows"), ("block", "tma"), ("mx", "e8m0_32x8")])
def test_how_many_rows_are_quantised_may_depend_on_values(granularity: str, layout: str) -> None:
    """A tracer knows no number for the rows of ``x[mask]``; whether there are any is seen when they are quantised."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it takes half a second

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        rows = mode.from_tensor(ONE(6, 256))[mode.from_tensor(ONE(6, dtype=torch.bool))]
        q, scale = tritongemm.quantize(rows, granularity, FP8, layout)
    assert q.shape[1] == 256 and scale.dim() == 2
    q, scale = torch.ops.tritongemm.quantize(ONE(0, 256), granularity, FP8, layout)
    assert q.shape == (0, 256) and scale.shape[0] == 0
    refuses(r"\(256, 0\)", torch.ops.tritongemm.quantize, ONE(256, 0), granularity, FP8, layout)


def bare(*shape: int) -> Tensor:
    return ONE(shape, device="meta")


MATRICES, ENDS = r"must be \[M, K\] or", bare(3).int()
MIXTURE: tuple[Any, ...] = bare(M), ENDS, "silu", None, None


@cases(
    ("scaled_mm", (bare(M, K).byte(), bare(K).byte(), bare(M), bare(N)), "row-major, or its transposed view"),
    ("scaled_mm", (bare(M, K).byte(), bare(N, K + 1).byte(), bare(M), bare(N)), "row-major, or its transposed"),
    ("grouped_mm", (bare(M, K), bare(K, N), ENDS, None, None, torch.float32), MATRICES),
    ("grouped_mm", (bare(K), bare(2, K, N), ENDS, None, None, torch.float32), r"a \(256,\) and b"),
    ("grouped_mm", (bare(M, K), bare(2, K + 1, N), ENDS, None, None, torch.float32), MATRICES),
    ("grouped_mm", (bare(3, M, K), bare(2, K, N), ENDS, None, None, torch.float32), MATRICES),
    ("fused_moe", (bare(K), bare(2, N, K), bare(2, K, N // 2), *MIXTURE), "x .* w1 .* must"),
    ("fused_moe", (bare(M, K), bare(2, N, K), bare(2), *MIXTURE), "x .* w1 .* must be"),
    ("fused_moe", (bare(M, K), bare(2, N, K), bare(2, K, N), *MIXTURE), "wants a w2"),
    ("linear_fp8", (bare(M, K), bare(K).byte(), bare(N), None, torch.float32), r"must be \[..., K\] and \[N, K\]"),
    ("linear_fp8", (bare(M, 9), bare(N, K).byte(), bare(N), None, torch.float32), r"must be \[..., K\] and"),
    ("bmm", (bare(M, K), bare(K, N)), r"must be \[B, M, K\] and \[B, K, N\]"),
    ("bmm", (bare(2, M, K), bare(3, K, N)), r"must be \[B, M, K\] and \[B, K, N\]"),
    ("mm", (bare(M, K), bare(K)), r"must be \[..., K\] and \[N, K\]"),
    ("mm", (bare(M, K), bare(N, K + 1)), r"must be \[..., K\] and \[N, K\]"),
)
def test_shapes_that_do_not_belong_together_are_named(name: str, given: tuple[object, ...], says: str, /) -> None:
    refuses(says, getattr(torch.ops.tritongemm, name), *given)


@each("name", ["scaled_mm rows", "scaled_mm blocks", "scaled_bmm rows", "grouped_mm rows"])
def test_autocast_rounds_no_product_of_eight_bits(name: str) -> None:
    """Factors and numbers of eight bits are multiplied in float32 where no kernel serves; halves would overflow."""
    call = call_of(name)
    given = [one / 3 if one.dtype == torch.float32 else one for one in call.tensors]
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        plain = call(*given, out_dtype=wanted)
        for cast in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", cast):
                assert torch.equal(call(*given, out_dtype=wanted), plain)


def test_autocast_casts_as_a_linear_layer_and_jit_has_tensors_for_sizes() -> None:
    call = call_of("mm")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(), torch.nn.functional.linear(*call.tensors))
    for name in ("mm", "scaled_mm rows"):
        call, other = call_of(name), call_of(name, 2 * M)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda *given: call(*given), tuple(call.tensors))  # noqa: B023
        torch.testing.assert_close(traced(*other.tensors), other())


def test_products_that_pytorch_can_map_are_mapped() -> None:
    for name, places in (("mm", (0,)), ("scaled_mm columns", (0, 2)), ("scaled_bmm rows", (2,))):
        call = call_of(name)
        doubled = [one.double() * 2 if place in places else one for place, one in enumerate(call.tensors)]
        doubled = [two.to(one.dtype) for one, two in zip(call.tensors, doubled, strict=True)]
        given = [
            torch.stack(two) if two[0] is not two[1] else two[0] for two in zip(call.tensors, doubled, strict=True)
        ]
        dims = tuple(0 if place in places else None for place in range(len(given)))
        torch.testing.assert_close(torch.func.vmap(call, dims)(*given), torch.stack((call(), call(*doubled))))


@each(
    ("name", "place", "operand"),
    [("grouped_mm", 0, "a"), ("grouped_mm", 2, "offs"), ("quantize blocks tma", 0, "x"), ("linear_fp8 rows", 0, "x"),
     ("fused_moe", 0, "x")],
)  # fmt: skip
def test_what_can_not_be_mapped_is_named(name: str, place: int, operand: str) -> None:
    call = call_of(name)
    given = [torch.stack((one, one)) if at == place else one for at, one in enumerate(call.tensors)]
    dims = tuple(0 if at == place else None for at in range(len(given)))
    refuses(f"^{operand} is mapped by torch.func.vmap", torch.func.vmap(call, dims), *given)


def test_tensors_without_an_address_are_pytorchs(monkeypatch: Patch) -> None:
    """A shape that a kernel serves may come again inside of a transform, whose tensors have no memory of their own."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    _, w, of_a, of_w = call_of("scaled_mm columns").tensors
    batch = torch.randn(3, M, K)
    given = scaled.SCALED.operands(batch[0].to(FP8), w, of_a, of_w)
    reading = contract.Reading((), dict(zip(given._fields, given[:4], strict=False)), ((M, N), torch.bfloat16))
    served = OperandCall(scaled.SCALED, given, reading, lambda a, *_: a.float() * 2, StandInKernel(), stand_in_device())
    assert torch.equal(torch.func.vmap(lambda a: served(a, *given[1:]))(batch.to(FP8)), batch.to(FP8).float() * 2)
    refuse: Callable[..., Any] = lambda *_: pytest.fail("no kernel reads what has no address")
    monkeypatch.setattr("tritongemm.serving.launching.OperandCall.__call__", refuse)
    a, b = torch.randn(2, B, M, K), torch.randn(B, K, N)
    torch.testing.assert_close(torch.func.vmap(lambda a: tritongemm.bmm(a, b))(a)[1], a[1] @ b)


SCHEMAS = {
    "mm": "Tensor x, Tensor w, Tensor? bias=None, ScalarType? out_dtype=None",
    "bmm": "Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? scale_a=None, "
    'Tensor? scale_b=None, str scale_layout=""',
    "scaled_mm": "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType out_dtype=15, "
    'str order_b="plain", str scale_layout=""',
    "grouped_mm": "Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype, "
    'str scale_layout="", str order_b="plain", str act=""',
    "fused_moe": "Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, "
    'Tensor? w1_scale, Tensor? w2_scale, str scale_layout="", Tensor? w1_bias=None, Tensor? w2_bias=None, '
    'bool keep_activations=False, str order="plain"',
    "linear_fp8": "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
    "Tensor? unquantized=None",
    "quantize": "Tensor x, str granularity, ScalarType dtype, str layout",
}
WITHOUT_GRADIENTS = ("mm", "quantize")  # their gradients are those of PyTorch's own operations, or there are none


@each("name", SCHEMAS)
def test_schemas_stay(name: str) -> None:
    """Graphs and exported programs name them: they are a promise."""
    public = {"bmm": tritongemm.scaled_bmm}.get(name) or getattr(tritongemm, name)  # which defines the operation
    result = "(Tensor, Tensor)" if name == "quantize" else "Tensor"
    expected = {name: f"({SCHEMAS[name]}) -> {result}"}
    if name not in WITHOUT_GRADIENTS:
        expected[f"{name}_with_gradients"] = expected[name]
        expected[f"{name}_gradients"] = f"(Tensor gradient, bool[] wanted, {SCHEMAS[name]}) -> Tensor[]"
    registered = {operation: getattr(torch.ops.tritongemm, operation).default._schema for operation in expected}
    assert callable(public)
    assert {operation: str(schema) for operation, schema in registered.items()} == {
        operation: f"tritongemm::{operation}{schema}" for operation, schema in expected.items()
    }
