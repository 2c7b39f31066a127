"""A patched model: what is served, what is left, and that nothing else of it changes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritongemm
from tests.support.linear_layers import StandInKernel, problem, record, stand_in_kernels
from tests.support.served_region import Graphs, copies
from tritongemm.core.record import Record
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.patch import ServedLinear


class Block(nn.Module):  # type: ignore[misc]
    """A feed-forward block with a tied weight, an adapter and a layer of a foreign class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.tied = nn.Linear(64, 96)
        self.tied.weight = self.up.weight
        self.adapter = LoraLinear(nn.Linear(64, 96))
        self.other = QuantisedLinear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.up(x)) * self.tied(x))
        return y


class LoraLinear(nn.Module):  # type: ignore[misc]
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer


class QuantisedLinear(nn.Linear):  # type: ignore[misc]
    pass


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Rows for N=96 and K=64; the process's dispatcher is one without any."""
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", Dispatcher())
    return [record(problem(m, 96, 64, "n")) for m in (1, 16)]


def test_says_what_is_served_and_what_is_left(records: list[Record]) -> None:
    model = Block()
    patch = tritongemm.patch(model, records)
    assert patch.patched == ("up", "tied", "adapter.base_layer")
    assert patch.left == {
        "down": "no row for N=64, K=96",
        "adapter": f"of class {__name__}.LoraLinear",
        "other": f"of class {__name__}.QuantisedLinear",
    }
    assert str(patch).startswith(
        "0 of 6 linear layers are served; 3 patched, but on no GPU, so that PyTorch computes them; "
        "1 left: no row for N=64, K=96; 1 left: of class"
    )
    assert set(tritongemm.patch(model).left.values()) >= {"served already"}
    patch.undo()
    patch.undo()
    assert str(patch).startswith("0 of 6 linear layers are served; 1 left")
    assert not any(isinstance(module, ServedLinear) for module in model.modules())


def test_only_layers_whose_rows_serve_the_gpu_are_called_served(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for a GPU is where tensors of a CPU are."""
    turned = replace(records[0].problem, n=64, k=96, bias="none", b=records[0].problem.b._replace(row_major=True))
    tritongemm.load([*records, record(turned), record(problem(1, 32, 32), target="gfx942")])
    dispatcher = default_dispatcher()
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records, {r.problem: StandInKernel() for r in records})
    patch = tritongemm.patch(nn.ModuleList([nn.Linear(64, 96), nn.Linear(32, 32), nn.Linear(96, 64)]), join=False)
    assert str(patch) == (
        "1 of 3 linear layers are served; 1 patched, but with rows that are for gfx942; "
        "1 left: no row for N=64, K=96, but one with a row-major B or a column-major A (tune with -col_b)"
    )


def test_layers_that_others_changed_are_left(records: list[Record]) -> None:
    class Packed(Tensor):  # type: ignore[misc]
        pass

    hooked, packed, wrapped = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(64, 96)
    hooked.forward = lambda input: input  # as accelerate does
    packed.weight = nn.Parameter(torch.empty(96, 64).as_subclass(Packed), requires_grad=False)
    nn.utils.parametrizations.weight_norm(wrapped)
    left = tritongemm.patch(nn.ModuleList([hooked, packed, wrapped]), records).left
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not float"):
        tritongemm.patch(1.0)
    assert left["0"] == "another library replaced its forward" and left["1"] == "its weight is a Packed"
    assert "ParametrizedLinear" in left["2"]


def test_nothing_but_the_computation_changes(records: list[Record]) -> None:
    model, x = Block().bfloat16(), torch.randn(5, 64).bfloat16()
    before, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        expected = model(x)
        patch = tritongemm.patch(model, records)
        assert torch.equal(model(x), expected)
        assert model.state_dict().keys() == before.keys()
        assert [name for name, _ in model.named_parameters()] == names and model.up.weight is model.tied.weight
        copied, read = copies(model)
        for other in (copied, read):
            assert type(other.up) is ServedLinear and torch.equal(other(x), expected)
            assert other.up.weight is other.tied.weight
        copied.load_state_dict(before)
        patch.undo()
        assert type(model.up) is nn.Linear and type(copied.up) is ServedLinear
        assert model.to("meta").up.weight.is_meta


def test_training_is_pytorchs(records: list[Record]) -> None:
    model, x = Block(), torch.randn(5, 64, requires_grad=True)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    tritongemm.patch(model, records)
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=False) if p.grad is not None)


def test_one_graph_serves_every_m(records: list[Record]) -> None:
    model, graphs = Block(), Graphs("aot_eager")
    tritongemm.patch(model, records)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for rows in (2, 3, 17, 300):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1 and graphs[0].count(torch.ops.tritongemm.mm) == 2
