import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tritongemm
from tests.support.nouns import Defaults, FormatRow, InputError, OutputError, Patch, apart, cases, sizes
from tritongemm.workloads.capturing import counting, hooks
from tritongemm.workloads.m_spans import group_spans


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(params=["c", "python"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Patch) -> Path:
    if request.param == "python":
        monkeypatch.setattr(hooks, "make_counter", counting.PythonCounter)
    return tmp_path / "shapes.yaml"


def read(path: Path) -> dict[str, FormatRow]:
    return {row.problem.key: row for row in sizes.from_file(path, Defaults())}


def test_layers_of_a_model_are_counted_with_their_names(path: Path) -> None:
    model = Model().bfloat16()
    with torch.no_grad(), tritongemm.capture(path):
        for _ in range(10):
            model(torch.randn(2, 4, 16, dtype=torch.bfloat16))
        for _ in range(7):
            model(torch.randn(5, 16, dtype=torch.bfloat16))
    model(torch.randn(5, 16, dtype=torch.bfloat16))
    rows = read(path)
    assert {key: row.count for key, row in rows.items()} == {
        "8x32x16_bf16_TN": 30, "8x16x32_bf16_TN_biasn": 30, "5x32x16_bf16_TN": 21, "5x16x32_bf16_TN_biasn": 21,
    }  # fmt: skip
    assert rows["8x32x16_bf16_TN"].callers == ("layers.*.up",)
    assert rows["5x16x32_bf16_TN_biasn"].callers == ("layers.*.down",)
    assert {row.operation for row in rows.values()} == {"linear"}
    assert "Gradients" not in path.read_text(encoding="utf-8")


def test_a_second_capture_adds_to_what_is_there(path: Path) -> None:
    path.write_text(
        "# mine\n- {M: 5, N: 16, K: 32, dtype_a: bf16, rowMajorB: N, bias: n}\n- {M: 9, N: 9, K: 9}\n", encoding="utf-8"
    )
    before = path.read_text(encoding="utf-8")
    layer = nn.Linear(32, 16).bfloat16()
    for _ in range(2):
        with torch.no_grad(), tritongemm.capture(path):
            for _ in range(4):
                layer(torch.randn(5, 32, dtype=torch.bfloat16))
    assert path.read_text(encoding="utf-8").startswith(before) and read(path)["5x16x32_bf16_TN_biasn"].count == 9
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4


def some(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


@cases(
    (lambda: torch.mm(some(5, 6), some(6, 7)), "5x7x6_fp32_TT", "mm"),
    (lambda: some(5, 6).mm(some(7, 6).t()), "5x7x6_fp32_TN", "mm"),
    (lambda: some(6, 5).t() @ some(6, 7), "5x7x6_fp32_NT", "matmul by mm"),
    (lambda: torch.matmul(some(2, 3, 6), some(6, 7)), "6x7x6_fp32_TT", "matmul by mm"),
    (lambda: torch.addmm(some(7), some(5, 6), some(6, 7)), "5x7x6_fp32_TT_biasn", "addmm"),
    (lambda: torch.addmm(some(5, 7), some(5, 6), some(6, 7)), "5x7x6_fp32_TT", "addmm with a matrix"),
    (lambda: torch.addmm(some(7), some(5, 6), some(6, 7), beta=0), "5x7x6_fp32_TT", "addmm"),
    (lambda: torch.tensordot(some(5, 6), some(6, 7), dims=1), "5x7x6_fp32_TT", "tensordot by mm"),
    (lambda: torch.mm(some(5, 6), some(6, 7), out=some(5, 7)), "5x7x6_fp32_TT", "mm"),
    (lambda: torch._int_mm(bytes_of(32, 16), bytes_of(8, 16).t()), "32x8x16_int8-int8-int32_TN", "_int_mm"),
    (lambda: functional.linear(input=some(5, 6), weight=some(7, 6), bias=None), "5x7x6_fp32_TN", "linear"),
    (lambda: functional.linear(some(6), some(7, 6)), "1x7x6_fp32_TN", "linear"),
    (lambda: tritongemm.mm(some(5, 6), some(7, 6)), "5x7x6_fp32_TN", "tritongemm.mm"),
)
def test_each_operation_is_written_as_what_it_becomes(
    call: Callable[[], torch.Tensor], key: str, operation: str, /, tmp_path: Path
) -> None:
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        call()
        call()
    (row,) = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    assert (row.problem.key, row.operation, row.count) == (key, operation, 2)


@cases(
    (lambda: some(2, 3, 5, 6) @ some(2, 3, 6, 7), 6, "matmul by bmm", "", "none"),
    (lambda: torch.bmm(some(3, 5, 6), some(3, 6, 7)), 3, "bmm", "", "none"),
    (lambda: torch.bmm(some(3, 5, 6), some(6, 7).expand(3, 6, 7)), 3, "bmm", "b", "none"),
    (lambda: torch.bmm(some(5, 6).expand(3, 5, 6), some(3, 6, 7)), 3, "bmm", "a", "none"),
    (lambda: some(3, 5, 7).baddbmm(some(3, 5, 6), some(3, 6, 7)), 3, "baddbmm with a matrix", "", "none"),
    (lambda: some(3, 1, 7).baddbmm(some(3, 5, 6), some(3, 6, 7)), 3, "baddbmm", "", "n"),
    (lambda: torch.einsum("bij,bjk->bik", some(3, 5, 6), some(3, 6, 7)), 3, "einsum by bmm", "", "none"),
    (lambda: tritongemm.bmm(some(3, 5, 6), some(3, 6, 7), some(7)), 3, "tritongemm.bmm", "", "n"),
)
def test_batched_products_are_rows_that_can_be_tuned(
    call: Callable[[], torch.Tensor], batch: int, operation: str, shared: str, bias: str, /, tmp_path: Path
) -> None:
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        call()
    (row,) = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    assert (row.problem.m, row.problem.n, row.problem.k, row.problem.batch) == (5, 7, 6, batch)
    assert (row.operation, row.problem.shared, row.problem.bias) == (operation, shared, bias)
    (span,) = group_spans([row])
    assert span.problem == replace(row.problem, m=1), "a table over M can be made of it"


@apart(
    (lambda: torch.mm(torch.ones(2, 3).double(), torch.ones(3, 4).double()), "there are no kernels for float64"),
    (lambda: torch.ones(2, 3) @ torch.ones(3), "a product with a vector of 3"),
    (lambda: torch.mm(torch.eye(3).to_sparse(), torch.ones(3, 4)), "operands are sparse or nested tensors"),
)
def test_what_cannot_be_tuned_is_named(call: Callable[[], torch.Tensor], reason: str, /, path: Path) -> None:
    with tritongemm.capture(path):
        call()
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert len(read(path)) == 1 and f'"reason": "{reason}"' in path.read_text(encoding="utf-8")


def test_the_dtype_of_autocast_is_that_of_the_product(path: Path) -> None:
    layer = nn.Linear(6, 7, bias=False)
    with torch.no_grad(), tritongemm.capture(path):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                layer(torch.randn(5, 6))
                torch.mm(torch.randn(3, 6), torch.randn(6, 7))
    assert {key: row.count for key, row in read(path).items()} == {"5x7x6_bf16_TN": 3, "3x7x6_bf16_TT": 3}


def test_backward_products_are_named(path: Path) -> None:
    with tritongemm.capture(path):
        nn.Linear(6, 7)(torch.randn(5, 6)).sum().backward()
    assert "backward pass are not among them" in path.read_text(encoding="utf-8") and len(read(path)) == 1


def test_weights_that_die_are_not_mistaken_for_others(path: Path) -> None:
    """New weights get the places in memory, and so the identities, of dead ones."""
    with torch.no_grad(), tritongemm.capture(path):
        for n in (7, 8, 7, 9):
            x, w = torch.randn(5, 6), torch.randn(n, 6)
            for _ in range(4):
                functional.linear(x, w)
            del w
            gc.collect()
    assert {row.problem.n: row.count for row in read(path).values()} == {7: 8, 8: 4, 9: 4}


def test_everything_is_put_back(tmp_path: Path) -> None:
    def places() -> list[object]:
        owners = (torch, torch.functional, torch.linalg, torch.Tensor, functional, torch._C._nn, tritongemm)
        return [
            vars(owner).get(name) for owner in owners for name in ("linear", "mm", "einsum", "__matmul__", "compile")
        ]

    tritongemm.mm(torch.ones(1, 1), torch.ones(1, 1))
    before = places()
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        assert places() != before
        with pytest.raises(InputError, match="under way"), tritongemm.capture(tmp_path / "other.yaml"):
            pass
    assert places() == before


def test_errors_are_the_programs_own_and_tracers_see_pytorch(path: Path) -> None:
    with tritongemm.capture(path), pytest.raises(RuntimeError, match="cannot be multiplied"):
        functional.linear(torch.ones(2, 3), torch.ones(4, 5))
    with tritongemm.capture(path), pytest.raises(TypeError):
        functional.linear(torch.ones(2, 3))  # type: ignore[call-arg]
    assert not path.exists()
    layer = nn.Linear(3, 4)
    x = torch.randn(2, 3)
    with torch.no_grad(), tritongemm.capture(path):
        scripted, exported = torch.jit.script(layer), torch.export.export(layer, (x,))
    assert torch.equal(scripted(x), layer(x)) and torch.equal(exported.module()(x), layer(x))


def test_a_place_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("print(1)\n", encoding="utf-8")
    with pytest.raises(OutputError, match="is not a list of sizes"), tritongemm.capture(tmp_path / "app.py"):
        pass
    for name in ("a" * 5000, "a\0b", "a\ud800"):
        with (
            pytest.raises(OutputError, match=r"can't be written|no file can have"),
            tritongemm.capture(tmp_path / name),
        ):
            pass


def test_compiled_graphs_are_counted_at_their_true_sizes(path: Path) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(16, 32, bias=False)
    with torch.no_grad(), tritongemm.capture(path):
        compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
        for rows in (2, 2, 3, 3, 3):
            compiled(torch.randn(rows, 4, 16))
    assert {key: row.count for key, row in read(path).items()} == {"8x32x16_fp32_TN": 2, "12x32x16_fp32_TN": 3}
    torch._dynamo.reset()


class Graph:
    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


def test_graphs_count_again_when_they_are_launched(path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    layer, x = nn.Linear(6, 7, bias=False), torch.randn(5, 6)
    with torch.no_grad(), tritongemm.capture(path):
        layer(x)
        graph = Graph()
        graph.capture_begin()
        layer(x)
        layer(x)
        graph.capture_end()
        for _ in range(10):
            graph.replay()
    assert read(path)["5x7x6_fp32_TN"].count == 23 and not hasattr(Graph.replay, "__wrapped__")


def test_aiter_gets_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "bf16_untuned_gemm.csv"
    head = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\r\n"
    path.write_bytes((head + "1,7,6,False,torch.bfloat16,torch.bfloat16,False,False\r\n9,9,9, False,x,y,z,").encode())
    before = path.read_bytes()
    layer = nn.Linear(6, 7).bfloat16()
    with torch.no_grad(), tritongemm.capture(path):
        for rows in (1, 5, 5):
            layer(torch.randn(rows, 6, dtype=torch.bfloat16))
            functional.linear(torch.randn(rows, 6).bfloat16(), layer.weight)
    assert path.read_bytes() == before + (
        b"\n1,7,6,True,torch.bfloat16,torch.bfloat16,False,False\n"
        b"5,7,6,True,torch.bfloat16,torch.bfloat16,False,False\n"
        b"5,7,6,False,torch.bfloat16,torch.bfloat16,False,False\n"
    )


def test_a_class_that_computes_functions_itself_finds_them(path: Path) -> None:
    """Its table has the functions as they were when it was made: PyTorch's own, or the hooks."""

    def make_class() -> type[torch.Tensor]:
        table = {functional.linear: "linear", torch.matmul: "matmul", torch.Tensor.matmul: "method"}

        class Quantised(torch.Tensor):  # type: ignore[misc]
            @classmethod
            def __torch_function__(
                cls, func: object, types: object, args: object = (), kwargs: object = None
            ) -> object:
                return table.get(func, "unknown")

        return Quantised

    before, x = make_class(), torch.ones(2, 3)
    with tritongemm.capture(path):
        for kind in (before, make_class()):
            w = torch.ones(3, 3).as_subclass(kind)
            called = functional.linear(x, w), functional.linear(x, weight=w), torch.matmul(x, w), w @ x, x @ w
            assert called == ("linear", "linear", "matmul", "method", "method")
