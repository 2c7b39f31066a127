"""Results of a run written to the tables of a server, which keeps a folder of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stores import take
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.formats import Defaults
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.results.tuned_file import TunedFile
from tritongemm.search_spaces.loader import load_target

VLLM, SGLANG = (registry.get(ServerFormat, name) for name in ("vllm_dense_json", "sglang_dense_json"))
NAME = "N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
TOOLS = {"triton": "3.6.0", "torch": "2.13.0", "device": "NVIDIA H200"}
BLOCKS = Defaults(family="a8w8_blockscale")
SIZES = [row.problem for row in VLLM.list_sizes(6144, 4096, BLOCKS)]
TODAY = Config("tile", 64, 128, 128, 32, num_warps=4, num_stages=2)  # what vLLM runs without a table


def test_the_sizes_are_those_that_the_server_looks_up() -> None:
    assert [p.m for p in SIZES[:3]] == [1, 2, 4] and {p.layout for p in SIZES} == {"TN"}
    channels = SGLANG.list_sizes(6144, 4096, Defaults.of("fp8", family="a8w8"))
    assert 33 in [row.problem.m for row in channels] and channels[0].problem.family == "a8w8"
    with pytest.raises(InputError, match=r"vLLM has no tables of family a8w8 of fp8; choose --family: a8w8_blockscale"):
        VLLM.list_sizes(6144, 4096, Defaults(family="a8w8"))


def test_what_the_servers_kernel_takes() -> None:
    limits = VLLM.limits("a8w8_blockscale", load_target("sm90"))
    assert (limits.most_splits, limits.templates, limits.first) == (1, ("tile",), (TODAY,))
    assert dict(limits.axes) == {"block_k": (16, 32, 64, 128)}
    assert dict(SGLANG.limits("a8w8_blockscale", load_target("gfx942")).axes) == {"block_k": (128,)}
    assert SGLANG.limits("a8w8", load_target("sm90")).first == (), "there SGLang runs CUTLASS"


def test_the_fastest_config_that_the_server_runs_is_written_whichever_won(tmp_path: Path) -> None:
    """A library that won is nothing to a server without a plug-in; ours of more than it takes is nothing either."""
    written = TunedFile.find(tmp_path / NAME)
    assert written is not None and written.place == tmp_path
    (tmp_path / "README.txt").write_bytes(b"\xff")
    best, other, ours = (Config("tile", m, 64, 128, 8) for m in (16, 32, 64))
    ours = replace(ours, split_k=2)
    times = {ours: 1e-5, best: 2e-5, other: 3e-5, TODAY: 4e-5}
    trials = [Trial(config, "ok", samples=(s,), timer="events", stage="final") for config, s in times.items()]
    record = Record(
        SIZES[3], "sm90", ours, "torch", 1e-5, 0.0, "events", library="torch", library_seconds=9e-6, toolchain=TOOLS
    )
    with take(written.results, target="sm90", toolchain=TOOLS) as store:
        store.add_trials(SIZES[3], trials, record)
        found = written.write(store, [SIZES[3]])
    assert [*found.files] == [NAME] and not found.omitted
    rows = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    assert rows["8"]["BLOCK_SIZE_M"] == 16 and rows["8"]["num_stages"] == best.num_stages
    assert rows["16"]["BLOCK_SIZE_M"] == 64 and len(rows) == len(SIZES), "elsewhere it runs what it does today"


def test_the_servers_own_kernel_is_written_where_it_was_raced(tmp_path: Path) -> None:
    """Whatever a template of ours with the same tiles took; with fields that only the own kernel has a row for."""
    place = tmp_path / NAME.replace("128,128", "128, 128")
    written = TunedFile.find(place)
    assert written is not None
    ours = Config("tile", 16, 64, 128, 8)
    slow, swapped = (replace(ours, backend="sglang", num_stages=s) for s in (2, 3))
    swapped = replace(swapped, split_k=4, options=(("swap_ab", 1),))
    times = {ours: 1e-5, swapped: 2e-5, slow: 3e-5, replace(swapped, backend="vllm"): 5e-6}
    trials = [Trial(config, "ok", samples=(s,), timer="events", stage="final") for config, s in times.items()]
    record = Record(SIZES[3], "sm90", ours, "triton", 1e-5, 0.0, "events", toolchain=TOOLS)
    assert (
        SGLANG.can_express(swapped)
        and SGLANG.can_express(ours)
        and not SGLANG.can_express(replace(swapped, backend="vllm"))
    )
    assert not SGLANG.can_express(replace(ours, split_k=4)), "ours adds splits up in another way"
    assert not VLLM.can_express(replace(swapped, backend="vllm")), "vLLM's does not split"
    with take(written.results, target="sm90", toolchain=TOOLS) as store:
        store.add_trials(SIZES[3], trials, record)
        found = written.write(store, [SIZES[3]])
    assert found.count == 1 and not found.omitted
    rows = json.loads(place.read_text(encoding="utf-8"))
    assert (rows["8"]["SPLIT_K"], rows["8"]["SWAP_AB"], rows["8"]["num_stages"]) == (4, True, 3)
    assert "SPLIT_K" not in rows["16"]
    (read,) = (row for row in SGLANG.read(place, place.read_text(encoding="utf-8"), BLOCKS) if row.problem.m == 8)
    assert read.config == replace(swapped, backend="triton")
