import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.support import ROOT, forked, libraries, serve_library, stored_calls
from tests.support.libraries import linear, tuned
from tests.support.linear_layers import HostDriver
from tests.support.nouns import DamagedFileWarning, Patch, Support, heavy, refuses
from tests.support.serve_library import REFUSED
from tritongemm.export.library import writing
from tritongemm.serving import stored_kernels
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.loaded_tables import read_table

RECORDS = tuned(linear(32, 48, 64), m_from=1), tuned(linear(16, 48, 64)), tuned(linear(8, 48, 32))


def test_nothing_that_compiles_is_imported(tmp_path: Path) -> None:
    libraries.write(tmp_path / "library.zip", *RECORDS)
    done = forked.run(["-m", "tests.support.serve_library", str(tmp_path / "library.zip")], ROOT)
    assert done.stdout.splitlines() == [
        "rows 3",
        f"range: M 1 to 32: {libraries.TILE.name} (2.00 us, 1.50x torch) at M 32",
        f"exact: {libraries.TILE.name} (2.00 us, 1.50x torch)",
        "fallback: 40x48x64_fp32_TN was never tuned for sm90; the table over M has 1 to 32, and not this one",
        "loaded 2",
        "imported []",
    ], done.stderr
    assert {"triton", "jinja2", "joblib", "yaml"} <= set(REFUSED)


SERVED = """\
rows 9
quantize: quantize_rows, right
scaled_mm: rows, right
linear_fp8: quantize_groups, blocks, right
bmm: heads, right
scaled_bmm: scaled batch, right
scaled_bmm: scaled batch, right
scaled_bmm: scaled batch, right
grouped_mm: plain first, right
grouped_mm: plain first, right
fused_moe: route_rows, plain first, activate_rows, plain second, combine_rows, right
fused_moe of fp8: route_rows, first, activate_rows, second, combine_rows, right
"""


@pytest.mark.parametrize("lacking", ["", heavy("combine_rows"), "quantize_rows"])
def test_every_call_is_served_where_nothing_can_be_compiled(tmp_path: Path, monkeypatch: Patch, lacking: str) -> None:
    """Kernels beside the products are the library's too; of one that it lacks PyTorch takes the place, and says so."""
    stored_calls.write(tmp_path / "library.zip", monkeypatch, lacking)
    done = forked.run(["-m", "tests.support.stored_calls", str(tmp_path / "library.zip")], ROOT)
    assert done.returncode == 0, done.stderr
    calls, _, notices = done.stdout.partition("warned: ")
    wanted = SERVED.replace(f", {lacking}", "").replace(f" {lacking},", "") if lacking else SERVED + "imported []\n"
    assert calls == wanted, done.stdout
    assert bool(notices) == bool(lacking)
    if lacking:
        assert f"no library that is loaded has {lacking} of" in notices and notices.endswith("imported []\n")


@pytest.fixture
def gpu(monkeypatch: Patch) -> HostDriver:
    """A machine whose one GPU, an sm90 of 132 compute units, is the CPU, and a dispatcher that knows no records."""
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", Dispatcher())
    return serve_library.stand_in(monkeypatch)


def call(m: int, n: int = 48, k: int = 64) -> str:
    x, w = torch.randn(m, k), torch.randn(n, k)
    torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T)
    return tritongemm.explain(x, w).splitlines()[0]


def test_code_is_loaded_by_the_first_call_of_a_kernel(gpu: HostDriver, tmp_path: Path) -> None:
    libraries.write(tmp_path / "library", *RECORDS)
    assert tritongemm.load(tmp_path / "library") == 3 and gpu.loaded == []
    for m in (3, 4, 3, 31):
        assert call(m).startswith("range: M 1 to 32: ")
    assert [code for code, _ in gpu.loaded] == [f"code of {RECORDS[0].problem.key}".encode()]


def test_damaged_code_costs_its_own_size(gpu: HostDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = libraries.write(tmp_path / "library", *RECORDS)[1].kernel
    assert kernel is not None
    (tmp_path / "library" / kernel.member).write_bytes(b"x" * kernel.size)
    with caplog.at_level(logging.WARNING, "tritongemm"):
        tritongemm.load(tmp_path / "library")
        assert call(16).startswith("fallback: 16x48x64_fp32_TN on sm90") and call(16).endswith(
            "or copy the library again"
        )
    assert [record.message for record in caplog.records if "PyTorch computes 16x48x64" in record.message]
    assert call(8, k=32).startswith("exact: ") and [code for code, _ in gpu.loaded] == [
        f"code of {RECORDS[2].problem.key}".encode()
    ]


def test_a_damaged_entry_is_reported_and_the_others_serve(gpu: HostDriver, tmp_path: Path) -> None:
    libraries.write(tmp_path / "library", *RECORDS)
    for member in (tmp_path / "library" / "objects").iterdir():
        if member.read_bytes().startswith(b"code of 8x"):
            member.unlink()
    with pytest.warns(DamagedFileWarning, match="1 entries are not used: 8x48x32_fp32_TN on sm90 of 132 .* is missing"):
        assert tritongemm.load(tmp_path / "library") == 2
    assert call(8, k=32).startswith("fallback: ") and call(16).startswith("exact: ")
    for member in (tmp_path / "library" / "objects").iterdir():
        member.unlink()
    refuses("none of its entries can be used", tritongemm.load, tmp_path / "library")


def test_libraries_of_another_gpu_and_of_other_ranks_are_distinguished(tmp_path: Path, gpu: HostDriver) -> None:
    for name in ("folder", "copy.zip"):
        libraries.write(tmp_path / name, *RECORDS)
    libraries.write(tmp_path / "other", *RECORDS[:2])
    folder, copy, other = (read_table(tmp_path / name).digest for name in ("folder", "copy.zip", "other"))
    assert folder == copy != other
    foreign = replace(RECORDS[0], target="gfx942", m_from=0), replace(RECORDS[1], compute_units=80)
    libraries.write(tmp_path / "library.zip", *foreign)
    assert tritongemm.load(tmp_path / "library.zip") == 2
    assert call(32).endswith("was tuned for gfx942; the device is sm90")
    assert call(16).endswith("was tuned on 80 compute units; the device has 132") and not gpu.loaded


def test_nothing_is_loaded_while_a_graph_is_captured(gpu: HostDriver, tmp_path: Path, monkeypatch: Patch) -> None:
    libraries.write(tmp_path / "library", *RECORDS)
    tritongemm.load(tmp_path / "library")
    default_dispatcher().device(-1)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "loaded by the first call" in call(16) and not gpu.loaded
    assert call(16).startswith("exact: ") and len(gpu.loaded) == 1


@pytest.mark.parametrize("right", [True, False])
def test_another_tritons_kernel_is_checked(gpu: HostDriver, tmp_path: Path, monkeypatch: Patch, right: bool) -> None:
    checked: list[str] = []

    def check(kernel: object, record: object, device: object) -> Support:
        checked.append("checked")
        return Support("" if right else "wrong with Triton 9")

    monkeypatch.setattr(stored_kernels, "check_kernel", check)
    entry = libraries.entry(RECORDS[1], b"code", toolchain={"triton": "9"})
    with writing.held(tmp_path / "library"):
        writing.write(tmp_path / "library", libraries.contents((entry, b"code")))
    tritongemm.load(tmp_path / "library")
    assert [call(16).startswith("exact: " if right else "fallback: 16x48x64_fp32_TN on sm90") for _ in range(2)] == [
        True
    ] * 2
    assert checked == ["checked"]
