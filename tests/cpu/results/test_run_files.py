"""What a run keeps beside its results: files of other programs are not touched, and never waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stores import ONE, journal_of, record, take
from tests.support.tables import each
from tritongemm.core.errors import OutputError
from tritongemm.results.run_files import holding_module_folder, module_folder

BESIDE = (".journal", ".journal.old", ".lock", ".pid")


def put_text(path: Path) -> None:
    path.write_text("dear diary\n")


def put_link(path: Path) -> None:
    path.with_name("precious").write_text("mine")
    path.symlink_to("precious")


@each("suffix", BESIDE)
@each("put", [put_text, put_link, os.mkfifo, Path.mkdir])
def test_what_stands_beside_an_output_is_refused_at_once(
    tmp_path: Path, suffix: str, put: Callable[[Path], None]
) -> None:
    """A lock of another program, a pipe without a reader, a link that was planted: each stays as it is."""
    path = tmp_path / f"out.yaml{suffix}"
    put(path)
    before = path.lstat()
    for resume in (True, False):
        with pytest.raises(
            OutputError, match=rf"out\.yaml{suffix} is .*; move it away, or choose another file with -o"
        ):
            take(tmp_path / "out.yaml", resume=resume)
    assert path.lstat() == before and not (tmp_path / "out.yaml").exists()
    if put is put_link:
        assert (tmp_path / "precious").read_text() == "mine"


def test_a_link_planted_while_a_run_holds_its_output_is_not_followed(tmp_path: Path) -> None:
    """Neither its process's number nor its journal is written through one."""
    path, precious = tmp_path / "out.yaml", tmp_path / "precious"
    precious.write_text("mine")
    with take(path) as store:
        store.add_record(record(ONE))
        store.merge()
        for planted in (tmp_path / "out.yaml.pid", journal_of(path)):
            planted.unlink()
            planted.symlink_to(precious)
    with pytest.raises(OutputError, match="is a link"):
        take(path)
    assert precious.read_text() == "mine"


def test_the_holder_of_an_output_is_reported_whatever_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path):
        assert (tmp_path / "out.yaml.pid").read_text() == str(os.getpid())
        with pytest.raises(OutputError, match=rf"held by another run \(process {os.getpid()}\)"):
            take(path)
        (tmp_path / "out.yaml.pid").unlink()
        with pytest.raises(OutputError, match=r"held by another run \(process unknown\)"):
            take(path)


def test_results_that_are_read_only_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path) as store:
        store.add_record(record(ONE))
        store.merge()
    path.chmod(0o444)
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"out\.yaml is read-only, so it is not replaced; choose"):
        take(path)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o444


@each("name", ["n" * 256, "n" * 243 + ".yaml", "/proc/out.yaml"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    """Nor may those be too long that a run keeps beside its results."""
    with pytest.raises(OutputError, match=r"can't be written: .*choose another file with -o"):
        take(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_every_output_has_its_folder_of_modules() -> None:
    """But for one with and one without the suffix, whose folder names its owner."""
    names = ["x.yaml", "x.yml", "x.YAML", "tuned.gfx942", "tuned.gfx90a", "a.b.yaml", "x.v1", "x.v2"]
    folders = [module_folder(Path("d") / name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[:2] == [Path("d/x_kernels"), Path("d/x.yml_kernels")]


def test_two_outputs_never_share_a_folder_of_modules(tmp_path: Path) -> None:
    """Neither at once nor one after the other."""
    one, other = tmp_path / "x.yaml", tmp_path / "x"
    folder = module_folder(one)
    assert folder == module_folder(other)
    folder.mkdir()
    half = folder / ".generated_kernel_1_1_1.py.724.4d05fe43"
    half.write_text("def")
    with holding_module_folder(folder, one):
        assert not half.exists(), "what a killed run left half-written is swept"
        for output in (one, other):
            with (
                pytest.raises(OutputError, match=r"another run writes its modules into .*x_kernels; wait for it"),
                holding_module_folder(folder, output),
            ):
                pass
    with holding_module_folder(folder, one):
        pass
    with (
        pytest.raises(
            OutputError, match=r"x_kernels holds the modules of x\.yaml, which .*choose another file with -o"
        ),
        holding_module_folder(folder, other),
    ):
        pass
