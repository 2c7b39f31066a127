"""``--for``: whose kernels race for a server's tables."""

from __future__ import annotations

import pytest

from tests.support.fakes import server_kernels
from tritongemm.cli import options, servers
from tritongemm.core.format_row import FormatRow
from tritongemm.formats import Defaults
from tritongemm.runtime.machine import Machine
from tritongemm.search_spaces.loader import load_target

H200 = Machine(load_target("sm90"), "nvidia", (0,), "H200", "a GPU")
TABLE = ["--for", "vllm", "-n", "6144", "-k", "4096", "--family", "a8w8_blockscale"]


def choose(words: list[str], machine: Machine = H200, dtype: str | None = None) -> tuple[str, str]:
    """The backend that races, and what is said of it."""
    args, said = options.parse(words), list[str]()
    defaults = Defaults(family="a8w8_blockscale", dtype_a=dtype)
    rows: list[FormatRow] = servers.server_format("vllm").list_sizes(6144, 4096, defaults, 1, (1, 16))
    return servers.choose_kernels(args, rows, machine, said.append), " ".join(said)


def test_the_servers_own_kernels_race_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, said = choose(TABLE)
    assert backend == "triton" and said.endswith(
        "in the places of vLLM's kernels, for the vllm package is not installed"
    )
    server_kernels.install_vllm(monkeypatch)
    backend, said = choose(TABLE)
    assert backend == "vllm" and "its own kernels race" in said
    backend, said = choose(TABLE, Machine(H200.target, "", (), "H200", "no GPU"))
    assert backend == "triton" and "no GPU to run its kernels on" in said
    backend, said = choose(TABLE, dtype="int8")
    assert backend == "triton" and "multiply fp8e4m3fn" in said


def test_the_user_may_say_whose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server_kernels.install_vllm(monkeypatch)
    assert choose([*TABLE, "--libtype", "triton"]) == ("triton", "")
    assert choose([*TABLE, "--libtype", "vllm"]) == ("vllm", "")
    with pytest.raises(SystemExit):
        options.parse([*TABLE, "--libtype", "blaslt"])
    assert "--for races one kernel: leave --libtype out, or name the server or triton" in capsys.readouterr().err
