import os
from pathlib import Path

import pytest

from tests.cpu.backends.test_asm import BF16, PLAIN, write
from tests.support import DATA
from tests.support.nouns import Patch, cases, refuses
from tritongemm.backends.asm import manifest, param_layout
from tritongemm.system import reading

FIELD = DATA / "aiter/hsa"
I8 = "tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n"
FP4 = "tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name\n"


@cases(
    (BF16, f"{PLAIN},p.co,1,32,64,3,0,1,128,1", (32, 64, 128, True, False, True, 3)),
    (I8, f"16,128,1,1,{PLAIN},p.co", (16, 128, 64, True, True, False, 0)),
    (FP4, f"32,256,0,0,{PLAIN},p.co", (32, 256, 64, False, False, False, 0)),
    ("knl_name,knl_file,tn,tileM,tileN,pf\n", f"{PLAIN},p.co,1,96,64,3", (96, 64, 64, False, False, False, 3)),
)  # fmt: skip
def test_spellings_of_columns(header: str, values: str, expected: tuple[int | bool, ...], /, tmp_path: Path) -> None:
    (row,) = manifest.read(write(tmp_path, f"// of a test\n{header}# none\n{values} ; last\n/* no\nmore */\n"))
    assert (row.tile_m, row.tile_n, row.sub_k, row.split_k, row.shuffled, row.bias, row.prefetch) == expected
    assert (row.symbol, row.path, row.line) == (PLAIN, tmp_path / "p.co", 4)


@cases(
    ("", "is empty"),
    ("knl_name,tileM,tileN\n", "no column coname"),
    (BF16 + f"{PLAIN},p.co,1,32\n", "line 2: 4 values for 10 columns"),
    (BF16 + f"{PLAIN},p.co,1,x,64,3,0,1,64,1\n", "line 2: column tilem is 'x'"),
    (BF16 + f"{PLAIN},p.co,1,²,64,3,0,1,64,1\n", "line 2: column tilem is '²', not a whole number of at most 9 digits"),
    (BF16 + f"{PLAIN},p.co,1,{'9' * 5000},64,3,0,1,64,1\n", "line 2: column tilem is '9{60}', not a whole number"),
    (BF16 + f"{PLAIN},/etc/passwd,1,32,64,3,0,1,64,1\n", "line 2: column co_name is '/etc/passwd', which leads out"),
    (BF16 + f"{PLAIN},a/../../p.co,1,32,64,3,0,1,64,1\n", "line 2: column co_name is 'a/../../p.co', which leads"),
    (BF16 + "x" * 140_000 + "\n", "line 2 is no CSV: field larger than field limit"),
    (BF16 + f"{PLAIN},p.co,1,0,64,3,0,1,64,1\n", "line 2: a tile of 0x64"),
    (BF16 + ",p.co,1,32,64,3,0,1,64,1\n", "line 2: a kernel needs a symbol"),
    (BF16 + f"{PLAIN},p.co,1,32,64,3,0,1,64,1\n" * 2, "line 3: .* is in line 2 already"),
)
def test_bad_manifests_are_named(text: str, named: str, /, tmp_path: Path) -> None:
    refuses(named, manifest.read, write(tmp_path, text))


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    """As spreadsheets write CSV files."""
    path = write(tmp_path, f"{I8}16,128,1,1,{PLAIN},p.co\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row.tile_m for row in manifest.read(path)] == [16]
    path.write_bytes(b"\xff" + path.read_bytes())
    refuses(r"kernels\.csv is not text: byte 0 is not UTF-8", manifest.read, path)


def test_pipes_and_devices_are_no_manifests(tmp_path: Path, monkeypatch: Patch) -> None:
    """Nothing waits for a writer, and nothing is read without end."""
    monkeypatch.setattr(reading, "WRITER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe.csv")
    refuses(r"pipe\.csv is a pipe, and nothing came out of it", manifest.read, tmp_path / "pipe.csv")
    refuses("/dev/zero is a device or a socket; name a file", manifest.read, Path("/dev/zero"))


@pytest.mark.skipif(not FIELD.is_dir(), reason="AITER's manifests are not at hand")
def test_field_manifests() -> None:
    counts = {str(f.relative_to(FIELD).parent): len(manifest.read(f)) for f in FIELD.rglob("*.csv")}
    assert counts == {
        "gfx942/bf16gemm": 22, "gfx942/i8gemm": 9, "gfx942/fp8gemm_blockscale": 6, "gfx950/bf16gemm": 24,
        "gfx950/f4gemm": 35,
    }  # fmt: skip
    for file in FIELD.rglob("*.csv"):
        for row in manifest.read(file):
            assert isinstance(param_layout.declared(row.layout, row.symbol), param_layout.Layout)
