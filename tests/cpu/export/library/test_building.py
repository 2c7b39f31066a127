from dataclasses import replace
from pathlib import Path

from tests.support import libraries
from tests.support.libraries import TILE, UNITS
from tests.support.nouns import ArtifactCache, Capsys, Config, Launch, Machine, Patch, Record, loader, settings
from tritongemm.build import prepare
from tritongemm.build.prepare import PreparedKernel
from tritongemm.cli import library as command
from tritongemm.export.library import building
from tritongemm.export.library.storage import open_library
from tritongemm.hip_ext import machine
from tritongemm.results.store import Store

TMA = Config("tma", 64, 64, 64, num_warps=4)
HERE = Machine(loader.load_target("gfx942"), "", (), "", "")
RANGE = libraries.tuned(libraries.linear(77, 96, 160, "bf16"), m_from=5)
MAPS = replace(libraries.tuned(libraries.linear(130, 96, 160, "bf16"), m_from=60), config=TMA)
LOST = libraries.tuned(libraries.linear(7, 96, 160, "bf16"), winner="torch")


def _launches(record: Record) -> list[Launch]:
    target = replace(loader.load_target("sm90"), compute_units=UNITS)
    prepared = prepare.prepare_kernels([record], target, ArtifactCache(settings.cache_folder()))[record.problem]
    assert isinstance(prepared, PreparedKernel)
    found = [prepared.launch_at(m) for m in range(record.m_from, record.problem.m + 1)]
    return [one for one in found if isinstance(one, Launch)]


def test_a_file_of_results_becomes_a_library(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    predicted = replace(RANGE, problem=RANGE.problem.at(99), timer="model", m_from=78)
    with Store.open(tmp_path / "tuned.yaml", "sm90", {}, {}) as store:
        for record in (RANGE, replace(MAPS, code="0" * 64), LOST, predicted):
            store.add_record(record)
        store.merge()
    monkeypatch.setattr(machine, "find_machine", lambda _: HERE)
    out = tmp_path / "library.zip"
    assert command.main(["build", str(tmp_path / "tuned.yaml"), "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert "1 of 2 kernels are not the code that was measured, as they are" in said.err
    assert "prediction (timer: model)" in said.err and said.out.startswith(f"{out}: 3 results, 2 with kernels of ")
    library = open_library(out)
    entries = {entry.record.config: entry for entry in library.entries if entry.kernel is not None}
    assert entries.keys() == {TILE, TMA} and not library.faults()
    for record in (RANGE, MAPS):
        kernel = entries[record.config].kernel
        assert kernel is not None and kernel.toolchain["triton"] == settings.version("triton")
        for at, launch in zip(libraries.all_launches(kernel.launches), _launches(record), strict=True):
            assert at == replace(launch, path="") and library.read_code(kernel) == launch.read_code()


def test_what_no_library_can_hold_or_its_reader_refuses_is_left_out(monkeypatch: Patch) -> None:
    """Here launches of another range of M."""
    named = replace(RANGE, target=""), replace(RANGE, winner="absent", config=replace(TILE, backend="absent"))
    refused = replace(RANGE, target="sm1"), replace(RANGE, config=replace(TILE, block_m=24))
    built = building.build([*named, *refused, LOST], HERE)
    assert [entry.record for entry in built.entries] == [LOST]
    reasons = [reason for _, reason in built.left_out]
    assert [any(word in reason for reason in reasons) for word in ("names no target", "absent", "sm1", "power of two")]
    assert len(reasons) == 4
    wider = replace(RANGE, m_from=4)
    monkeypatch.setattr(building, "_can_be_held", lambda _: replace(libraries.entry(RANGE, b"code"), record=wider))
    built = building.build([wider], HERE)
    reason = "a library can't hold it: its launches are not those of its range of M"
    assert not built.entries and built.left_out == [(wider, reason)]
