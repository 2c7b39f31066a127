import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritongemm
from tests.support.linear_layers import problem, record, stand_in_kernels
from tests.support.served_region import Graphs, copies
from tritongemm.core.record import Record
from tritongemm.serving import joined_layers
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.patch import JoinedLinear, Patch, ServedLinear

K, HEADS, KV = 64, 256, 128
PARTS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(K, HEADS, bias)
        self.k_proj, self.v_proj = nn.Linear(K, KV, bias), nn.Linear(K, KV, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Calls(list[int]):
    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        self.append(w.shape[0])
        return functional.linear(x, w, bias)


@pytest.fixture
def calls(unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Products of a CPU that says to be an sm90, by a process that has read no records."""
    made = Calls()
    monkeypatch.setattr("tritongemm.serving.patch.mm", made)
    monkeypatch.setattr("tritongemm.serving.joined_layers.mm", made)
    monkeypatch.setattr("tritongemm.serving.joined_layers._stream", lambda index: 0)
    with torch.no_grad():
        yield made


def make_records(bias: str = "none") -> list[Record]:
    """The parts take 6 us; together 2 at an M up to 16, and 7 at 17 to 64."""
    parts = [record(problem(64, n, K, bias), m_from=1) for n in (HEADS, KV)]
    entire = record(problem(16, HEADS + 2 * KV, K, bias), m_from=1)
    return [*parts, entire, replace(record(problem(64, HEADS + 2 * KV, K, bias), m_from=17), seconds=7e-6)]


def patch(model: nn.Module, records: list[Record], join: bool = True) -> Patch:
    tritongemm.load(records)
    dispatcher = default_dispatcher()
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records)
    return tritongemm.patch(model, join=join)


def make(bias: bool = False) -> Attention:
    torch.manual_seed(0)
    model = Attention(bias)
    model.bfloat16()
    return model


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, K).bfloat16()


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_computes_all_where_it_is_faster(calls: Calls, bias: bool) -> None:
    model = make(bias)
    xs = [inputs(2, 3), inputs(16), inputs(17), inputs(1, 1)]
    wanted = [model(x) for x in xs]
    parameters = dict(model.named_parameters())
    patched = patch(model, make_records("n" if bias else "none"))
    assert patched.joined == (PARTS,)
    assert str(patched) == "3 of 3 linear layers are served; 1 group of q_proj, k_proj, v_proj joined"
    assert all(parameters[name] is p for name, p in model.named_parameters())
    apart, together = [HEADS, KV, KV], [HEADS + 2 * KV]
    for x, theirs, products in zip(xs, wanted, (apart, together, apart, together), strict=True):
        calls.clear()
        assert_equal(model(x), theirs)
        assert calls == products  # the first time it is only seen that all read one input
    view = model(inputs(2, 3))[1].view(2, 3, 4, 32)  # as models split heads
    assert view.shape == (2, 3, 4, 32)
    patched.undo()
    assert model.q_proj.weight.untyped_storage().nbytes() == HEADS * K * 2
    assert_equal(model(xs[0]), wanted[0])


def test_another_tensor_a_changed_one_and_another_order_are_computed_by_themselves(calls: Calls) -> None:
    model = make()
    patch(model, make_records())
    x, other = inputs(4), inputs(4)
    model(x)
    wanted = [functional.linear(t, model.k_proj.weight) for t in (other, x * 2)]
    model.q_proj(x)
    assert_equal((model.k_proj(other),), (wanted[0],))
    model(x)
    calls.clear()
    model(x)
    assert calls == [HEADS + 2 * KV]
    model.q_proj(x)
    x.mul_(2)
    assert_equal((model.k_proj(x),), (wanted[1],))
    x = inputs(4)
    model(x)
    calls.clear()
    model.v_proj(x), model.k_proj(x), model.k_proj(x)
    assert calls == [HEADS + 2 * KV, KV], "a part is given once, as its reader may change it in place"


def test_layers_that_read_different_tensors_are_never_computed_for_each_other(calls: Calls) -> None:
    model = make()
    patch(model, make_records())
    for _ in range(3):
        x, other = inputs(4), inputs(4)
        model.q_proj(x), model.k_proj(other), model.v_proj(other)
    assert calls == [HEADS, KV, KV] * 3


def test_modes_and_replaced_weights_are_left_to_the_layers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(), inputs(4)
    patch(model, make_records())
    model(x)
    calls.clear()
    with torch.enable_grad():
        model(x)
    with torch.inference_mode():
        model(inputs(4))
    with monkeypatch.context() as patched:
        patched.setattr(joined_layers, "_autocast", lambda: True)
        model(x)
    assert calls == [HEADS, KV, KV] * 3
    model.k_proj.weight.data = model.k_proj.weight.data * 2
    calls.clear()
    ours = model(x)
    assert calls == [HEADS, KV, KV]
    assert_equal(ours, tuple(functional.linear(x, getattr(model, name).weight) for name in PARTS))


def test_weights_changed_in_place_count_and_stay_after_undo(calls: Calls) -> None:
    model, x = make(), inputs(4)
    patched = patch(model, make_records())
    model(x)
    model.v_proj.weight.mul_(3)
    model.load_state_dict({**model.state_dict(), "k_proj.weight": torch.ones(KV, K)})
    calls.clear()
    before = model(x)
    assert calls == [HEADS + 2 * KV]
    with patched.paused():
        assert type(model.q_proj) is nn.Linear
        assert_equal(model(x), before)
    assert type(model.q_proj) is JoinedLinear
    patched.undo()
    patched.undo()
    assert_equal(model(x), before)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 3


def test_threads_do_not_share_what_is_kept(calls: Calls) -> None:
    model, x = make(), inputs(4)
    patch(model, make_records())
    model(x)
    model.q_proj(x)
    calls.clear()
    thread = threading.Thread(target=lambda: torch.no_grad()(model.k_proj)(x))
    thread.start()
    thread.join()
    model.k_proj(x), model.v_proj(x)
    assert calls == [KV]


def test_nothing_is_kept_after_the_last_layer(calls: Calls) -> None:
    model, x = make(), inputs(4)
    patched = patch(model, make_records())
    model(x)
    q = model.q_proj(x)
    kept = weakref.ref(q._base)
    del q
    assert kept() is not None
    model.k_proj(x), model.v_proj(x)
    assert kept() is None
    layer = weakref.ref(model.q_proj)
    del model, patched
    assert layer() is None, "a model is given back without a search for cycles"


def test_copies_and_pickles_are_served_by_themselves(calls: Calls) -> None:
    model, x = make(), inputs(4)
    wanted = model(x)
    patch(model, make_records())
    model(x)
    for other in copies(model):
        calls.clear()
        assert_equal(other(x), wanted)
        assert calls == [HEADS, KV, KV] and isinstance(other.q_proj, ServedLinear)


def test_what_is_not_joined(calls: Calls) -> None:
    tied, dtypes, biased, small, kept = make(), make(), make(), make(), make()
    tied.v_proj.weight = tied.k_proj.weight
    dtypes.k_proj.float()
    biased.k_proj = nn.Linear(K, KV).bfloat16()
    one_memory = torch.cat([small.k_proj.weight.data, small.v_proj.weight.data])
    small.k_proj.weight.data, small.v_proj.weight.data = one_memory[:KV], one_memory[KV:]
    records = make_records()
    for model in (tied, dtypes, biased, small):
        assert patch(model, [*records, record(problem(1, KV, K, "n"))]).joined == ()
    assert patch(kept, records, join=False).joined == ()
    monotone = [replace(r, seconds=9e-6) if r.problem.n == HEADS + 2 * KV else r for r in records]
    assert patch(make(), monotone).joined == (), "slower at every M"


def test_what_the_library_won_counts_with_its_time(calls: Calls) -> None:
    records = [replace(r, winner="torch", library_seconds=2e-6, seconds=9e-6) for r in make_records()]
    model, x = make(), inputs(4)
    assert patch(model, records).joined == (PARTS,)
    model(x), model(x)
    assert calls == [HEADS, KV, KV, HEADS + 2 * KV]
    tritongemm.load([replace(r, library_seconds=7e-6) for r in records if r.problem.n == HEADS + 2 * KV])
    dispatcher = default_dispatcher()
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records)
    calls.clear()
    model(x)
    assert calls == [HEADS, KV, KV], "records that are loaded later count"


@pytest.mark.usefixtures("unloaded")
def test_a_compiled_model_is_served_layer_by_layer() -> None:
    model, x = make(), inputs(4)
    wanted = model(x)
    patch(model, make_records())
    graphs = Graphs()
    with torch.no_grad():
        assert_equal(torch.compile(model, fullgraph=True, backend=graphs)(x), wanted)
    assert [graph.count(torch.ops.tritongemm.mm) for graph in graphs] == [3]


def test_invariant_rows_are_joined_if_all_add_up_in_one_order(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """At other M the layers are computed apart, so a row would depend on M otherwise."""
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    for orders, joined in (((f"1x{K}", f"1x{K}"), True), ((f"1x{K}", "2x32"), False)):
        model = make()
        patched = patch(model, [replace(r, order=orders[r.problem.n == KV]) for r in make_records()])
        assert bool(patched.joined) == joined
        for _ in range(2):
            calls.clear()
            model(inputs(16))
        assert calls == ([HEADS + 2 * KV] if joined else [HEADS, KV, KV])
