from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import StandInKernel, attach_device, problem, record, stand_in_kernels
from tests.support.nouns import ArtifactCache, Config, Groups, LoadedKernel, Patch, Record, Support, cases, load_target
from tests.support.products import product
from tritongemm.build import prepare
from tritongemm.core.errors import WorkspaceError
from tritongemm.core.problem import Operand, Problem
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.serving import kernel_loading
from tritongemm.serving.device_kernels import DeviceKernels, NearKernel
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.linear_fp8 import BlockOperands, find_layout
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.server_calls import product_or
from tritongemm.system import settings

FP8 = torch.float8_e4m3fn
SM90 = load_target("sm90", compute_units=132)


def scaled(m: int, scales: str = "", family: str = "a8w8_blockscale", dtype: str = "fp8e4m3fn", **more: Any) -> Problem:
    return product(family, m, 256, 512, dtype, scales, **more)


@cases(
    (problem(777, 256, 512), "sm90", False),
    (replace(problem(777, 256, 512), batch=4), "sm90", False),
    (scaled(777), "sm90", False),
    (scaled(777, "group"), "sm90", False),
    (scaled(777), "gfx942", True),
    (replace(scaled(777), c=Operand("fp16")), "sm90", True),
    (replace(scaled(777), n=250), "sm90", True),
    (scaled(777, order="shuffled_16x16"), "sm90", True),
    (scaled(777, "mx"), "sm90", True),
    (scaled(777, dtype="int8"), "sm90", True),
    (scaled(777, family="a8w8"), "gfx942", False),
    (scaled(777, family="a8w8", dtype="int8"), "sm90", False),
    (scaled(16, family="a8w8", dtype="int8"), "sm90", True),
    (scaled(777, family="a8w8", batch=4), "sm90", True),
    (scaled(777, groups=Groups(4)), "sm90", True),
)
def test_rows_serve_other_m_where_pytorch_has_no_fast_call(asked: Problem, arch: str, serves: bool, /) -> None:
    assert serves_other_m(asked, arch) == serves


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def attach(dispatcher: Dispatcher, *records: Record) -> dict[str, list[int]]:
    """Serve records by stand-ins; the M that kernels are bound to, by the key of their rows."""
    dispatcher.load(records)
    kernels = attach_device(dispatcher)
    asked: dict[str, list[int]] = {}
    for row in records:
        if row.winner != "triton":
            continue
        (kernels.loaded_ranges if row.m_from else kernels.loaded)[row.problem] = StandInKernel()

        def bind(m: int, key: str = row.problem.key) -> LoadedKernel:
            asked.setdefault(key, []).append(m)
            return StandInKernel()

        kernels.binders[row.problem, row.m_from] = bind
    return asked


def said(m: int, scales: str) -> str:
    a, w = empty(m, 512, dtype=FP8), empty(256, 512, dtype=FP8)
    powers = [empty(rows, 16, dtype=torch.uint8) for rows in (m, 256)]
    of_a, of_b = powers if scales == "mx" else (empty(4, m).t(), empty(2, 4))
    return tritongemm.explain("scaled_mm", a, w, of_a, of_b)


def test_the_next_larger_m_serves_else_the_largest(gpu: Gpu) -> None:
    own = next(p for p in _mx_problems(16))
    rows = [record(own), record(own.at(64), m_from=33), record(own.at(8), winner="torch"), record(scaled(64))]
    asked = attach(gpu[0], *rows)
    assert said(16, "mx").startswith("exact") and said(40, "mx").startswith("range: M 33 to 64")
    assert said(8, "mx").startswith("library") and not asked.get(own.key)
    for m, by in ((3, 16), (9, 16), (20, 64), (777, 64)):
        text = said(m, "mx")
        assert text.startswith(f"near: M {by}, as no row has {m}: tile__") and "near_record serves the call" in text
        assert asked[own.at(by).key][-1] == m
    assert said(777, "block").startswith("fallback: ") and "PyTorch has no fast call" in said(777, "block")


def _mx_problems(m: int) -> Iterator[Problem]:
    """The problems that a call with powers of two may be taken for, the first of which is looked for first."""
    from tritongemm.operations.scaled_operands import ScaledOperands, read_product

    a, w = empty(m, 512, dtype=FP8), empty(256, 512, dtype=FP8)
    of_a, of_b = (empty(rows, 16, dtype=torch.uint8) for rows in (m, 256))
    yield from read_product(ScaledOperands(a, w, of_a, of_b)).problems()


def test_rows_of_another_gpu_do_not_serve_other_m(gpu: Gpu) -> None:
    """Neither of fewer compute units nor of another architecture: the split and the grid follow from them."""
    own = next(_mx_problems(64))
    attach(gpu[0], record(own, compute_units=78), record(own.at(128), target="gfx950"))
    assert said(777, "mx").startswith("fallback: ") and not gpu[0]._devices[0].near_rows(own.at(777))
    attach(gpu[0], record(own.at(16), compute_units=132))
    assert said(777, "mx").startswith("near: M 16, as no row has 777")


def test_a_row_that_can_not_be_launched_there_leaves_the_call_to_the_next_one(gpu: Gpu) -> None:
    own = next(_mx_problems(16))
    attach(gpu[0], record(own), record(own.at(64)))
    kernels = gpu[0]._devices[0]
    kernels.binders[own.at(64), 0] = lambda m: Support(f"M {m} needs another binary")
    assert said(777, "mx").startswith("near: M 16, as no row has 777")
    kernels.binders[own, 0] = lambda m: Support("gone")
    assert "near_record declines: 64x256x512" in said(777, "mx") and "needs another binary" in said(777, "mx")


def test_layers_take_rows_of_other_m_and_servers_do_not(gpu: Gpu) -> None:
    """A server's own kernel, which computes what no row has, is fast."""
    exact, far = (replace(scaled(m, scales), c=Operand("fp16")) for m, scales in ((16, "block_rows"), (64, "block")))
    attach(gpu[0], record(exact), record(far))
    weight, scale = empty(256, 512, dtype=FP8), empty(2, 4)

    def operands(m: int) -> BlockOperands:
        return BlockOperands(empty(m, 512, dtype=torch.bfloat16), weight, scale, out_dtype=torch.float16)

    found = {m: (find_layout(operands(m), near=True), find_layout(operands(m), near=False)) for m in (16, 20, 777)}
    assert found == {16: ("rows", "rows"), 20: ("groups", None), 777: ("groups", None)}
    theirs = empty(777, 256)
    assert product_or(operands(777), lambda: theirs) is theirs


def test_a_layout_found_at_an_m_is_what_the_row_reads_at_others(gpu: Gpu) -> None:
    """Dense factors are padded ones too at a multiple of four rows alone; and another layout has a row at 41."""
    rows = (
        record(scaled(3), m_from=1),
        record(scaled(64, "block_tma"), m_from=4),
        record(scaled(128, "block_tma"), m_from=65),
    )
    attach(gpu[0], *rows, record(scaled(41, "block_rows")))
    weight, scale = empty(256, 512, dtype=FP8), empty(2, 4)
    layouts = {
        m: find_layout(BlockOperands(empty(m, 512, dtype=torch.bfloat16), weight, scale), near=False)
        for m in (68, 69, 80, 20, 21, 39, 41, 1, 2, 3)
    }
    assert layouts == {
        68: "groups", 69: "tma", 80: "tma", 20: "groups", 21: "tma", 39: "tma", 41: "rows", 1: "groups", 2: "groups",
        3: "groups",
    }  # fmt: skip


class Sharing(StandInKernel):
    def __init__(self, workspace: int, semaphore: int) -> None:
        self.needs = {"workspace": workspace, "semaphore": semaphore}

    def bytes(self, buffer: str) -> int:
        return self.needs[buffer]


def test_a_kernel_at_another_m_has_the_memory_that_its_programs_share(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    own = scaled(64, groups=Groups(4))
    device = stand_in_kernels(RecordTable([record(own)]), {own: Sharing(1024, 256)})
    device.device.reserve_workspaces(1024, 256)
    needs = {100: (2048, 256), 200: (512, 512), 300: (1 << 30, 256)}
    device.binders[own, 0] = lambda m: Sharing(*needs[m])

    def find(m: int) -> NearKernel | Support:
        return device.find_near(own.at(m))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "while a graph is captured" in str(find(100))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not isinstance(find(100), Support) and not isinstance(find(200), Support)
    pool = device.device.workspaces
    assert pool is not None and pool.holds(2048, 512)
    assert "would share 1073741824 bytes" in str(find(300)) and device.device.workspaces is pool

    def full(*_: int) -> None:
        raise WorkspaceError("no memory for what programs share")

    needs[100] = (4096, 256)
    monkeypatch.setattr(device.device, "reserve_workspaces", full)
    assert "no memory for what programs share" in str(find(100))


@pytest.mark.parametrize("groups", [None, Groups(4)])
def test_one_binary_serves_every_m(groups: Groups | None) -> None:
    """The launch beyond a row's own M is that of a kernel compiled for it."""
    template = "grouped" if groups else "tile"
    row = record(scaled(64, groups=groups), Config(template, 16, 32, 128, num_warps=4, num_stages=2))
    cache = ArtifactCache(settings.cache_folder())
    prepared = prepare.prepare_kernels([row], SM90, cache)[row.problem]
    assert not isinstance(prepared, Support), str(prepared)
    for m in (5, 5000):
        assert prepared.serves(m)
        own = replace(row, problem=row.problem.at(m))
        assert prepared.launch_at(m) == prepare.prepare_launches([own], SM90, cache)[own.problem]
    turned = replace(row, problem=replace(row.problem, a=row.problem.a._replace(row_major=False)))
    job = prepare.compile_job(turned.problem, turned.config, SM90)
    assert not isinstance(job, Support), str(job)
    at = replace(prepared, record=turned, artifact=replace(prepared.artifact, digest=job.digest))
    assert at.serves(64) and "M 33 needs another binary" in str(at.serves(32)) and not at.serves(128)
    huge = kernel_loading._bind(prepared, StandInKernel(), 64, 2**31 - 5)
    assert isinstance(huge, Support) and "beyond the 32 bits" in huge.reason


COUNTS = (5, 0, 9, 2)


def rows_of_groups(m: int, counts: tuple[int, ...] = ()) -> Problem:
    groups = Groups(4, spread="captured" if counts else "uniform", counts=counts)
    return product("a8w8", m, 144, 256, "fp8e4m3fn", groups=groups)


def test_groups_have_the_record_of_the_next_larger_m() -> None:
    def tuned(m: int, counts: tuple[int, ...] = (), **changes: Any) -> Record:
        return record(rows_of_groups(m, counts), Config("grouped", 16, 32, 64), **changes)

    def serving(*records: Record) -> DeviceKernels:
        loaded = {r.problem: StandInKernel() for r in records if r.winner == "triton"}
        device = stand_in_kernels(RecordTable(records))
        device.loaded = {p: kernel for p, kernel in loaded.items() if p in {r.problem for r in records if not r.m_from}}
        device.loaded_ranges = {r.problem: loaded[r.problem] for r in records if r.m_from}
        device.binders = {(r.problem, r.m_from): (lambda m: StandInKernel()) for r in records}
        return device

    def served(device: DeviceKernels, m: int) -> int:
        found = device.find_near(rows_of_groups(m))
        assert not isinstance(found, Support), str(found)
        return found.row.record.problem.m

    records = [tuned(8), tuned(64), tuned(sum(COUNTS), COUNTS), tuned(256)]
    device = serving(*records)
    wanted = {1: 8, 9: 16, 16: 16, 17: 64, 100: 256, 1000: 256}
    assert {m: served(device, m) for m in wanted} == wanted
    assert isinstance(device.find_near(product("dense", 8, 144, 256, "fp32 fp32 fp32", groups=Groups(4))), Support)
    assert served(serving(*(replace(r, m_from=r.problem.m // 2) for r in records)), 9) == 16
    alone = serving(replace(tuned(8), config=Config("grouped_gemv", 1, 4, 256)))
    assert served(alone, 32) == 8 and "for 32 rows at most" in str(alone.find_near(rows_of_groups(33)))
    # A row whose kernel can't be launched there leaves the call to the next one, but for PyTorch's own product.
    device.binders[records[3].problem, 0] = lambda m: Support("another binary")
    assert served(device, 1000) == 64
    lost = serving(tuned(8), tuned(64, winner="torch"))
    assert served(lost, 3) == 8 and "PyTorch's own product won there" in str(lost.find_near(rows_of_groups(65)))
    # An epilogue that is slower than the tuned product and one more kernel serves, as no two steps of groups are tuned.
    gated = record(replace(rows_of_groups(8), epilogue="silu_mul"), Config("grouped", 16, 32, 64))
    slow = serving(tuned(8), replace(gated, seconds=9e-6))
    assert not isinstance(slow.find_near(gated.problem.at(5)), Support) and slow.has_kernel(gated.problem)


def test_kernels_read_dense_rows_of_groups() -> None:
    ends = torch.tensor([[5, 0], [5, 0], [14, 0], [16, 0]], dtype=torch.int32)[:, 0]
    assert not ends.is_contiguous()
    operands = GroupedOperands(torch.randn(16, 32), torch.randn(4, 8, 32).mT, ends, None, None, torch.float32)
    read = GROUPED.tensors(operands)
    assert read["offsets"].is_contiguous() and torch.equal(read["offsets"], ends)
