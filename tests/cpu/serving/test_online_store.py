"""What was found while programs ran is kept for the next process, whatever happens to the file."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.linear_layers import problem, record
from tests.support.nouns import Config, Problem, Record, each
from tritongemm.serving import online
from tritongemm.serving.online import CSV_FILE, CSV_HEADER, FILE, OnlineStore

SIZE = problem(6, 20, 32, "n", "fp32")


def kept(of: Problem, template: str = "best") -> Record:
    config = Config(template, 16, 16, 16, options=(("index", 7),), backend="toy_library")
    return record(of, config, winner="toy_library", compute_units=132) if of else record(of)


def add(store: OnlineStore, record_: Record) -> None:
    store.add(replace(record_, toolchain={"toy_library": "1"}), record_.config)


def find(store: OnlineStore, of: Problem) -> Record | None:
    return store.find(of, "sm90", 132, "toy_library", "1")


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    path = tmp_path / FILE
    add(OnlineStore(path, tmp_path / CSV_FILE), kept(SIZE))
    good = path.read_bytes()
    damaged = [b"\xff\xfe", b"[" * 100_000, b'{"problem": 1}', b"null", good[:-20].rstrip(), good.replace(b"1", b'"1"')]
    path.write_bytes(b"\n".join(damaged) + b"\n" + good + b'{"torn": ')
    store = OnlineStore(path, tmp_path / CSV_FILE)
    assert find(store, SIZE)
    other = problem(1, 2, 3)
    add(store, kept(other))  # it begins a line of its own
    assert find(store, other) and find(OnlineStore(path, tmp_path / CSV_FILE), other)


def test_processes_append_at_once(tmp_path: Path) -> None:
    """Each line complete, one header, one row for a size however many found it."""
    sizes = [problem(m, 20, 32) for m in range(1, 9)]

    def work() -> None:
        store = OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE)
        for size in sizes:
            add(store, kept(size))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / FILE).read_text().splitlines()) == 4 * len(sizes)
    rows = (tmp_path / CSV_FILE).read_text().splitlines()
    assert rows.count(CSV_HEADER) == 1 and len(rows) == 1 + len(sizes) == len(set(rows))
    assert all(find(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), size) for size in sizes)


def test_aiters_own_rows_stay(tmp_path: Path) -> None:
    theirs = f"{CSV_HEADER}\nfalse,false,T,N,1280,16,8192,bf16_r,8192,0,bf16_r,8192,0,bf16_r,1280,0,f32_r,1,9,Cijk"
    (tmp_path / CSV_FILE).write_text(theirs)  # without an end
    add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))
    assert (tmp_path / CSV_FILE).read_text().startswith(theirs + "\nfalse,")


@each("name", [FILE, CSV_FILE])
def test_what_can_not_be_written_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.warns(UserWarning, match=f"{name} can't be written: "):
        add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))


def test_another_programs_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / CSV_FILE).write_text("my notes\n")
    with pytest.warns(UserWarning, match="it begins with another line"):
        add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))
    assert (tmp_path / CSV_FILE).read_text() == "my notes\n"


def test_types_as_the_file_writes_them() -> None:
    def types(dtype: str) -> list[str]:
        row = online.csv_row(problem(16, 1280, 8192, dtype=dtype), kept(SIZE).config).split(",")
        return [row[7], row[10], row[13], row[16]]

    assert types("bf16") == ["bf16_r"] * 3 + ["f32_r"] and types("fp16") == ["f16_r"] * 3 + ["f32_r"]
