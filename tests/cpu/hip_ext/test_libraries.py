import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tables import each
from tritongemm.core.errors import InputError, ToolKilledError, UnavailableError
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.blaslt import variants as blaslt_variants
from tritongemm.hip_ext.blaslt.tables import Matrix
from tritongemm.hip_ext.compilers import toolchain


def test_missing_libraries_and_compilers_that_refuse(tmp_path: Path) -> None:
    (tmp_path / "libnothing.so.2").write_text("not a library")
    with pytest.raises(UnavailableError) as caught:
        libraries.load("Nothing", ("libnothing.so.2", "libnothing.so"), [tmp_path])
    text = str(caught.value)
    assert text.startswith(f"Nothing: no library found; looked for {tmp_path / 'libnothing.so.2'} (")
    assert "file too short" in text or "invalid ELF header" in text
    assert text.endswith("libnothing.so.2, libnothing.so")
    with pytest.raises(InputError, match="tool refuses the source: error: no such thing"):
        toolchain.run(tool(tmp_path, "echo 'error: no such thing' >&2; exit 1", 9), 5.0)
    assert (tmp_path / "runs").read_text() == "run\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_loaded_library_is_found_before_any_other(tmp_path: Path) -> None:
    path = tmp_path / "libloadedonce.so.3"
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(path)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(path))
    assert libraries.mapped("libloadedonce.so") == path
    assert libraries.load("it", ("libloadedonce.so.1",))._handle == loaded._handle
    assert libraries.mapped("libneverloaded.so") is None


def test_wheel_folders_are_found_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fakewheel/lib/deep").mkdir(parents=True)
    (tmp_path / "fakewheel/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert libraries.wheel_folders("fakewheel/lib/deep", "fakewheel/none", "no_such_wheel/lib") == [
        tmp_path / "fakewheel/lib/deep"
    ]


def tool(folder: Path, ends: str, times: int) -> list[str]:
    script = folder / "tool"
    script.write_text(
        f"""#!/bin/sh
echo run >> {folder}/runs
[ $(wc -l < {folder}/runs) -gt {times} ] && echo version 1 && exit 0
{ends}
"""
    )
    script.chmod(0o755)
    return [str(script)]


@each(
    "ends",
    ["kill -9 $$", "kill -15 $$", "echo 'nvcc error : cicc died due to signal 9' >&2; exit 9",
     "echo 'clang: error: unable to execute command: Killed' >&2; exit 254"],
)  # fmt: skip
def test_a_compiler_that_is_killed_is_run_again(tmp_path: Path, ends: str) -> None:
    """Its source is not to blame, and no kernel is remembered as one that does not compile."""
    assert toolchain.first_line(tool(tmp_path, ends, 1)) == "version 1"
    (tmp_path / "runs").unlink()
    with pytest.raises(ToolKilledError, match="tool was killed 2 times"):
        toolchain.run(tool(tmp_path, ends, 9), 5.0)


def test_the_tables_agree_with_the_headers() -> None:
    """Fingerprints of cublasLt.h of CUDA 13.1, all 634 tiles and 36 stages."""

    def mark(table: dict[int, tuple[int, int]]) -> str:
        return hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()[:16]

    assert (mark(blaslt_tables.tiles()), mark(blaslt_tables.stages())) == ("7a2810358ac8576b", "d878ca7ce9cb92c2")
    assert blaslt_tables.AMD.operations["T"] == 112 and blaslt_tables.NVIDIA.operations["T"] == 1


def test_tiles_that_fill_the_device_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """224 columns make two rounds of 256 tiles on 132 SMs; 256 columns two rounds of longer ones, 128 four."""
    of = {shape: tile for tile, shape in blaslt_tables.tiles().items()}
    capable = {1: [of[256, 128], of[128, 128], of[224, 128]], 2: [of[224, 128], of[64, 64], 10_000]}
    monkeypatch.setattr(blaslt_variants, "read_capability_list", lambda _, seed, __: capable[dict(seed.values)["algo"]])
    prepared: Any = SimpleNamespace(matmul=SimpleNamespace(d=Matrix("bf16", 28672, 256, 28672)))
    seeds = [blaslt_tables.Algorithm(b"", 0, (("algo", number), ("tile", 1))) for number in capable]
    found = [(v["algo"], blaslt_tables.tiles()[v["tile"]]) for v in blaslt_variants.vary_tile(prepared, seeds, 132)]
    assert found == [(1, (224, 128)), (2, (224, 128)), (1, (256, 128)), (1, (128, 128)), (2, (64, 64))]
