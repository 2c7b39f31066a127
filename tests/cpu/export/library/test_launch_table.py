import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support import libraries
from tests.support.nouns import Buffer, Launch, Param, Support, cases, refuses
from tritongemm.export.library.building import widen
from tritongemm.export.library.launch_table import LaunchTable, tabulate
from tritongemm.export.library.launch_values import table_from_json, table_to_json

SHA256 = "0" * 64


def blocks(m: int, block: int) -> int:
    return -(-m // block)


@given(
    low=st.integers(1, 300), count=st.integers(1, 300), block=st.sampled_from([1, 3, 16, 64, 192]),
    units=st.sampled_from([1, 7, 132]), columns=st.integers(1, 9),
)  # fmt: skip
def test_every_m_has_its_own_launch(low: int, count: int, block: int, units: int, columns: int) -> None:
    """Of grids by tiles, of persistent ones, of workspaces that come and go, and of tensor maps of M rows."""

    def launch_at(m: int) -> Launch:
        tiles = blocks(m, block) * columns
        partial = tiles % units  # of the last round are cut along K, and none where there is no such round
        params = (Param("tma", "a", (block, 64), (m, 64), 64), Param("i32", m), Param("i64", 8 * m), Param("f32", 0.5))
        buffers = (Buffer("workspace", 4 * partial), Buffer("semaphore", 64))
        zeroed = (Buffer("c", 2 * m),)
        return Launch("k.cubin", "k", (min(tiles, units), 1, blocks(m, 2 * block)), (128, 1, 1), 64, params,
                      tuple(b for b in buffers if b.bytes), zeroed=zeroed, sha256=SHA256)  # fmt: skip

    table = tabulate(launch_at, low, low + count - 1, block)
    assert isinstance(table, LaunchTable)
    every = list(map(launch_at, range(low, low + count)))
    assert list(libraries.all_launches(table)) == [replace(launch, path="") for launch in every]
    for name in ("workspace", "semaphore"):
        assert table.most_bytes(name) == max(sum(b.bytes for b in one.buffers if b.name == name) for one in every)
    assert isinstance(table.at(low - 1), Support) and isinstance(table.at(low + count), Support)
    again = table_from_json(json.loads(json.dumps(table_to_json(table))), SHA256)
    assert [one.pack({}, {0: bytes(128)}) for one in every] == [
        at.pack({}, {0: bytes(128)}) for at in libraries.all_launches(again) if isinstance(at, Launch)
    ]


def test_tables_are_short_and_of_one_kind_of_launch() -> None:
    """A grid by tiles is one run, whatever the range."""
    table = tabulate(lambda m: libraries.launch_at(libraries.linear(8192, 48, 64), m), 1, 8192, 16)
    assert isinstance(table, LaunchTable)
    assert {name: len(runs) for name, runs in table.runs.items()} == {
        "grid.0": 1, "params.3.value": 1, "buffers.workspace": 1,
    }  # fmt: skip

    def launch_at(m: int) -> Launch | Support:
        one = libraries.launch_at(libraries.linear(8, 48, 64), m)
        return replace(one, cluster=2) if m > 4 else one

    assert "more than numbers" in str(tabulate(launch_at, 1, 8, 16))
    assert str(tabulate(lambda m: Support("too many workgroups"), 3, 3, 16)) == "M 3: too many workgroups"


def _set(*place: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        held: Any = data
        for step in place[:-1]:
            held = held[step]
        held[place[-1]] = to

    return change


@cases(
    (_set("low", to=0), "low must be"),
    (_set("low", to=99), "low must be at most high"),
    (_set("launch", "grid", to=[1, 70000, 1]), "grid must be at most"),
    (_set("launch", "grid", to=[1, 1]), "grid must be a list"),
    (_set("launch", "block", to=[1024, 1024, 1]), "at most 1024 threads"),
    (_set("launch", "symbol", to=""), "symbol must be"),
    (_set("launch", "shared", to=1 << 30), "shared must be"),
    (_set("launch", "at", 1, to=1 << 40), "at must be"),
    (_set("launch", "at", 1, to=4), "one after another"),
    (_set("launch", "at", to=[0]), "6 offsets"),
    (_set("launch", "params", 0, to={"kind": "code", "value": "a"}), "kind must be one of"),
    (_set("launch", "params", 0, to={"kind": "pointer", "value": 7}), "name of a buffer"),
    (_set("launch", "params", 3, to={"kind": "i32", "value": 2**40}), "can't be 1099511627776"),
    (_set("launch", "params", 3, to={"kind": "i32", "value": 1, "path": "/etc"}), "no field path"),
    (_set("launch", "buffers", to={"workspace": 1 << 60}), "buffers must be"),
    (_set("runs", "block.0", to=[[1, 1, 0, 1]]), "not of block.0"),
    (_set("runs", "grid.0", to=[[1, 1, 1 << 40, 1]]), "must stay within"),
    (_set("runs", "grid.0", to=[[1, 0, 0, 1]]), "must stay within"),
    (_set("runs", "grid.0", to=[[2, 1, 0, 1]]), "must begin at 1"),
    (_set("runs", "grid.0", to=[[1, 1, 0, 0]]), "must stay within"),
    (_set("runs", "grid.0", to=[]), "not of grid.0"),
)
def test_numbers_from_a_file_are_bounded(change: Callable[[dict[str, Any]], None], complaint: str, /) -> None:
    table = tabulate(lambda m: libraries.launch_at(libraries.linear(40, 48, 64), m), 1, 40, 16)
    assert isinstance(table, LaunchTable)
    data = json.loads(json.dumps(table_to_json(table)))
    table_from_json(data, SHA256)
    change(data)
    refuses(complaint, table_from_json, data, SHA256)


@given(
    low=st.integers(1, 40), count=st.integers(1, 60), block=st.sampled_from([1, 16, 64]),
    units=st.sampled_from([7, 132, 10**9]), columns=st.integers(1, 9), cut=st.booleans(),
    asked=st.lists(st.integers(1, 5000), min_size=1, max_size=9),
)  # fmt: skip
def test_a_wider_table_has_the_launches_of_other_m(
    low: int, count: int, block: int, units: int, columns: int, cut: bool, asked: list[int]
) -> None:
    """Up to where the GPU is full and behind it; where workspaces come and go it ends early."""

    def launch_at(m: int) -> Launch | Support:
        tiles = blocks(m, block) * columns
        buffers = (Buffer("workspace", 4 * (tiles % units)),) if cut and tiles % units else ()
        params = Param("tma", "a", (block, 64), (m, 64), 64), Param("i32", m), Param("i64", 8 * m)
        launch = Launch("", "k", (min(tiles, units), 1, 1), (128, 1, 1), 64, params, buffers, sha256=SHA256)
        return launch if m <= 4000 else Support("too many rows")

    table = tabulate(launch_at, low, low + count, block)
    assert isinstance(table, LaunchTable)
    wider = widen(table, launch_at, block, 5000)
    assert wider.low == low and low + count <= wider.high <= 4000 and (cut or wider.high == 4000)
    for m in asked:
        wanted = launch_at(m) if low <= m <= wider.high else None
        found = wider.at(m)
        assert found == wanted if wanted is not None else isinstance(found, Support)
    reported = json.loads(json.dumps(table_to_json(wider)))
    assert json.loads(json.dumps(table_to_json(table_from_json(reported, SHA256)))) == reported
    for most in (low, low + count // 2, low + count):
        first = [launch_at(m) for m in range(low, most + 1)]
        sizes = [sum(b.bytes for b in one.buffers) for one in first if isinstance(one, Launch)]
        assert wider.most_bytes("workspace", most) == max(sizes)
