from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support import raising
from tests.support.linear_layers import (
    TILE,
    StandInKernel,
    attach_device,
    name_table,
    problem,
    record,
    stand_in_kernels,
)
from tests.support.nouns import Dispatcher, DriverError, LoadedKernel, Patch, Problem, Support, each, fails, refuses
from tritongemm.operations import torch_products
from tritongemm.operations.dense import DenseOperands
from tritongemm.serving import loaded_tables
from tritongemm.serving.calls import CallKey

SetPrecision: TypeAlias = Callable[[str], None]


def say(
    dispatcher: Dispatcher, x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> str:
    return str(dispatcher.explain(x, w, bias, out_dtype)).splitlines()[0]


def test_explains_why_no_kernel_serves(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    x, w = empty(16, 64), empty(32, 64)
    assert say(dispatcher, x, w) == "fallback: 16x32x64_bf16_TN was never tuned for sm90"
    assert say(dispatcher, x, w, empty(32, dtype=torch.float32)).endswith("kernels take bfloat16 (32,)")
    assert "never tuned" in say(dispatcher, x, w, empty(32)) and "never tuned" in say(
        dispatcher, x, w, None, torch.float32
    )
    assert "torch.float64" in say(dispatcher, empty(16, 64, dtype=torch.float64), w)
    assert "not [..., K] and [N, K]" in say(dispatcher, empty(16, 63), w) and "empty" in say(
        dispatcher, empty(0, 64), w
    )
    won = record(problem(16, 32, 64))
    assert dispatcher.load([won, record(replace(won.problem, bias="m"))]) == 1
    kernels = attach_device(dispatcher, {won.problem: StandInKernel()})
    assert say(dispatcher, empty(4, 4, 64), w) == f"exact: {TILE.name} (2.00 us, 1.50x torch)"
    kernels.loaded[won.problem] = Support("out_of_resources: shared memory 9 > 8 bytes")
    assert say(dispatcher, x, w).endswith("on sm90: out_of_resources: shared memory 9 > 8 bytes")


def test_what_no_tuned_kernel_serves_is_pytorchs_own(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    dispatcher.load([record(problem(2, 32, 64), winner="torch")])
    torch_kernel = StandInKernel()
    attach_device(dispatcher, torch_kernel=torch_kernel)
    for rows, kind, since in ((2, "library", ""), (3, "fallback", " from call 64 on")):
        resolution = dispatcher.explain(empty(1, rows, 64), empty(32, 64)).resolution
        assert resolution.kind == kind and resolution.kernel is torch_kernel and resolution.lasting
        assert str(resolution).endswith(f"; PyTorch's kernel, called directly{since}")
    assert dispatcher.explain(empty(64), empty(32, 64)).resolution.kernel is None


def test_a_size_never_tuned_is_resolved_again_once_it_is_frequent(gpu: Gpu, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.serving.calls.FREQUENT_CALLS", 3)
    torch_kernel = StandInKernel()
    made: list[tuple[LoadedKernel, tuple[int, ...], torch.dtype]] = []

    def call(
        kernel: LoadedKernel, device: object, shape: tuple[int, ...], dtype: torch.dtype, _: object
    ) -> Callable[..., str]:
        made.append((kernel, shape, dtype))
        return lambda x, w, bias, out_dtype: "called directly"

    monkeypatch.setattr("tritongemm.serving.launching.FastCall", call)
    attach_device(dispatcher, torch_kernel=torch_kernel)
    x, w = empty(2, 3, 64), empty(32, 64)
    assert [dispatcher.run(x, w, None, None).shape for _ in range(2)] == [(2, 3, 32)] * 2 and not made
    assert [dispatcher.run(x, w, None, None) for _ in range(3)] == ["called directly"] * 3
    assert made == [(torch_kernel, (2, 3, 32), torch.bfloat16)]
    # What PyTorch takes a detour for is not its linear layer.
    assert [dispatcher.run(empty(4, 64), w, None, torch.float64).dtype for _ in range(5)] == [torch.float64] * 5
    dispatcher.load([record(problem(9, 32, 64), winner="torch")])
    attach_device(dispatcher, torch_kernel=torch_kernel)
    assert dispatcher.run(empty(9, 64), w, None, None) == "called directly"
    dispatcher.load([record(problem(9, 32, 64), winner="torch", m_from=5)])
    attach_device(dispatcher, torch_kernel=torch_kernel)
    direct = [dispatcher.run(empty(7, 64), w, None, None) == "called directly" for _ in range(4)]
    assert direct == [False, False, True, True]


@pytest.fixture
def precision(monkeypatch: Patch) -> SetPrecision:
    def be(value: str) -> None:
        monkeypatch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: value)

    return be


def test_kernels_tuned_in_tf32_serve_while_pytorch_is_set_to_it(gpu: Gpu, precision: SetPrecision) -> None:
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    expected = {("tf32", True): "exact", ("tf32", False): "exact", ("fp32", False): "exact", ("fp32", True): "fallback"}
    for (setting, rounds), kind in expected.items():
        precision(setting)
        loaded: dict[Problem, LoadedKernel | Support] = {won.problem: StandInKernel()}
        kernels = attach_device(dispatcher, loaded, tf32=(won.problem,) if rounds else ())
        answers = dispatcher.explain(x, w)
        assert answers.resolution.kind == kind
    assert "tuned in tf32, while PyTorch multiplies float32 in full" in str(answers.resolution)
    kernels.loaded[won.problem] = Support("out_of_resources: shared memory 9 > 8 bytes")
    assert "out_of_resources" in say(dispatcher, x, w)


def test_float32_follows_pytorchs_precision(gpu: Gpu, precision: SetPrecision, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    kernel, torch_kernel = StandInKernel(), StandInKernel()
    attach_device(dispatcher, {won.problem: kernel}, torch_kernel, (won.problem,))
    made: list[LoadedKernel] = []

    def call(given: LoadedKernel, *_: object) -> Callable[..., str]:
        made.append(given)
        return lambda *_: "tuned" if given is kernel else "PyTorch's"

    monkeypatch.setattr("tritongemm.serving.launching.FastCall", call)
    monkeypatch.setattr("tritongemm.serving.calls.FREQUENT_CALLS", 1)
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    for _ in range(3):  # and nothing is made anew
        for setting, who in (("tf32", "tuned"), ("fp32", "PyTorch's")):
            precision(setting)
            assert [dispatcher.run(x, w, None, None) for _ in range(3)] == [who] * 3
    assert made == [kernel, torch_kernel]


def test_precision_changes_while_a_call_is_made_ready(gpu: Gpu, precision: SetPrecision, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    attach_device(dispatcher, {won.problem: StandInKernel()}, tf32=(won.problem,))

    def call(*_: object) -> Callable[..., str]:
        precision("fp32")  # another thread's doing
        return lambda *_: "tuned"

    monkeypatch.setattr("tritongemm.serving.launching.FastCall", call)
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    precision("tf32")
    assert dispatcher.run(x, w, None, None) == "tuned" and dispatcher.run(x, w, None, None).shape == (16, 32)


def test_mm_itself_follows_pytorchs_precision(gpu: Gpu, precision: SetPrecision, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu
    seen: list[tuple[str | None, DenseOperands]] = []

    def resolve(key: CallKey, operands: DenseOperands) -> Callable[..., None]:
        seen.append((key[6], operands))
        return lambda *_: None

    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    monkeypatch.setattr("tritongemm.operations.checks._modes", lambda: 0)  # fake tensors are one
    monkeypatch.setattr("tritongemm.operations.checks.PLAIN_TYPES", {type(empty(1))})
    monkeypatch.setattr(dispatcher, "resolve_layer", resolve)
    for setting in ("tf32", "fp32"):
        precision(setting)
        for dtype in (torch.float32, torch.bfloat16):
            x, w, bias = empty(3, 64, dtype=dtype), empty(32, 64, dtype=dtype), empty(32, dtype=dtype)
            tritongemm.mm(x, w)
            tritongemm.mm(x, w, bias)
    assert [precision for precision, _ in seen] == ["tf32", "tf32", None, None, "fp32", "fp32", None, None]
    assert all(isinstance(operands, DenseOperands) for _, operands in seen)


@each("old", [False, True])
def test_precision_is_what_pytorch_is_set_to(monkeypatch: Patch, old: bool) -> None:
    if old:
        monkeypatch.setattr(torch_products, "_read_precision", None)
    try:
        for name, value in (("high", "tf32"), ("highest", "fp32"), ("high", "tf32")):
            torch.set_float32_matmul_precision(name)
            assert torch_products.float32_precision() == value
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_capture_puts_off_the_question(gpu: Gpu, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.serving.calls.FREQUENT_CALLS", 2)
    monkeypatch.setattr("tritongemm.serving.launching.FastCall", lambda *_: lambda *_: "called directly")
    answers: list[LoadedKernel | None] = [None, None, StandInKernel()]
    monkeypatch.setattr(attach_device(dispatcher).torch_kernels, "find", lambda *_: answers.pop(0))
    x, w = empty(3, 64), empty(32, 64)
    dispatcher.run(x, w, None, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [dispatcher.run(x, w, None, None).shape for _ in range(2)] == [(3, 32)] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert dispatcher.run(x, w, None, None) == "called directly" and not answers


def test_what_fails_on_the_way_to_pytorchs_kernel_leaves_it_to_pytorch(gpu: Gpu, monkeypatch: Patch) -> None:
    dispatcher, empty = gpu

    error = DriverError("cublasLtMatmulDescCreate", 3, "CUBLAS_STATUS_ALLOC_FAILED")
    monkeypatch.setattr("tritongemm.serving.launching.FastCall", raising(error))
    monkeypatch.setattr("tritongemm.serving.calls.FREQUENT_CALLS", 2)
    x, w = empty(3, 64), empty(32, 64)
    attach_device(dispatcher, torch_kernel=StandInKernel())
    assert [dispatcher.run(x, w, None, None).shape for _ in range(4)] == [(3, 32)] * 4
    won = record(problem(3, 32, 64))
    dispatcher.load([won])
    attach_device(dispatcher, {won.problem: StandInKernel()})
    fails(DriverError, "", dispatcher.run, x, w, None, None)


def test_the_environment_names_the_records(
    gpu: Gpu, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    _, empty = gpu
    name_table(tmp_path, monkeypatch, record(problem(16, 32, 64), winner="torch"))
    monkeypatch.setattr(
        "tritongemm.serving.kernel_loading.load_device", lambda _, records, *others: stand_in_kernels(records)
    )
    assert say(Dispatcher(), empty(16, 64), empty(32, 64)).startswith("library: torch won")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(tmp_path / "gone.yaml"))
    refuses(r"gone\.yaml", say, Dispatcher(), empty(16, 64), empty(32, 64))
    loaded_tables.warn_of_missing.cache_clear()
    (loaded := Dispatcher()).load([record(problem(16, 32, 64))])
    loaded.run(torch.ones(1, 64), torch.ones(32, 64), None, None)
    assert not caplog.records, "other records were named"
    for m in (1, 2):  # without a GPU nothing is read
        assert Dispatcher().run(torch.ones(m, 64), torch.ones(32, 64), None, None).shape == (m, 32)
    assert [line.getMessage() for line in caplog.records] == [
        f"{tmp_path / 'gone.yaml'}: there is no such file; TRITONGEMM_CONFIG names it"
    ]


def test_explains_what_each_source_answered(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64))
    dispatcher.load([won])
    attach_device(dispatcher, {won.problem: StandInKernel()}, StandInKernel())
    exact, *lines = str(dispatcher.explain(empty(16, 64), empty(32, 64))).splitlines()
    assert exact.startswith("exact: ") and lines == ["  tuned_record serves the call"]
    said = str(dispatcher.explain(empty(17, 64), empty(32, 64))).splitlines()
    reason = "17x32x64_bf16_TN was never tuned for sm90; rows of this N x K are of M 16"
    assert said == [
        f"fallback: {reason}; PyTorch's kernel, called directly from call 64 on",
        f"  tuned_record declines: {reason}",
        "  library_winner declines: no library won the tuning of this size",
        "  near_record declines: rows serve other M only where PyTorch has no fast call of a product",
        "  invariant_kernel declines: rows need not be invariant (TRITONGEMM_INVARIANT=1)",
        "  online_algorithm declines: no algorithms are tried at run time (TRITONGEMM_ONLINE=1)",
        "  torch_kernel serves the call",
    ]
    assert str(dispatcher.explain(empty(17, 63), empty(32, 64))).count("\n") == 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_record_serves_devices_of_its_compute_units(gpu: Gpu, order: int) -> None:
    dispatcher, empty = gpu
    other, anywhere, ours = (record(problem(16, 32, 64), compute_units=units) for units in (304, 0, 80))
    x, w = empty(16, 64), empty(32, 64)
    loaded: dict[Problem, LoadedKernel | Support] = {other.problem: StandInKernel()}
    dispatcher.load([other])
    attach_device(dispatcher, loaded, compute_units=80)
    assert say(dispatcher, x, w) == "fallback: 16x32x64_bf16_TN was tuned on 304 compute units; the device has 80"
    attach_device(dispatcher, loaded, compute_units=304)
    assert dispatcher.explain(x, w).resolution.kind == "exact"
    dispatcher.load([replace(anywhere, config=replace(TILE, block_m=64)), replace(ours, seconds=1e-6)][::order])
    for units, shown in ((80, "1.00 us"), (304, "2.00 us"), (228, "bm64")):
        attach_device(dispatcher, loaded, compute_units=units)
        said = say(dispatcher, x, w)
        assert said.startswith("exact") and shown in said
    assert len(dispatcher._records.list_records("sm90", 80)) == 1
