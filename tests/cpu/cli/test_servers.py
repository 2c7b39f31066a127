"""``--for``: whose kernels race for a server's tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.fakes import server_kernels
from tests.support.nouns import Capsys, Config, Defaults, FormatRow, Machine, Patch, Problem, load_target, registry
from tritongemm.backends import _server_kernels
from tritongemm.backends._server_kernels import ServerBackend
from tritongemm.cli import options, tune
from tritongemm.plugins.contracts import LibraryBackend
from tritongemm.tune import cluster, servers, session

H200 = Machine(load_target("sm90"), "nvidia", (0,), "H200", "a GPU")
TABLE = ["--for", "vllm", "-n", "6144", "-k", "4096", "--family", "a8w8_blockscale"]


def choose(words: list[str], machine: Machine = H200, dtype: str = "") -> tuple[str, str]:
    request, said = tune.read_request(options.parse(words)), list[str]()
    defaults = Defaults.of(dtype, family="a8w8_blockscale")
    rows: list[FormatRow] = servers.server_format("vllm").list_sizes(6144, 4096, defaults, 1, (1, 16))
    return servers.choose_kernels(request, rows, machine, said.append), " ".join(said)


def test_the_servers_own_kernels_race_where_they_can_or_the_user_says_whose(monkeypatch: Patch, capsys: Capsys) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_server_kernels, "find_spec", lambda top: None)
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
    server_kernels.install_vllm(monkeypatch)
    assert choose([*TABLE, "--libtype", "triton"]) == ("triton", "")
    assert choose([*TABLE, "--libtype", "vllm"]) == ("vllm", "")
    with pytest.raises(SystemExit):
        options.parse([*TABLE, "--libtype", "blaslt"])
    assert "--for races one kernel: omit --libtype, or name the server or triton" in capsys.readouterr().err


class ScriptedEvaluator(FakeEvaluator):
    """A device that lists what a server's backend would try, and times each as its tile has rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__("sm90", baseline_seconds=1e-6)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        library = registry.get(LibraryBackend, backend)
        assert isinstance(library, ServerBackend)
        return library.list_candidates(problem, self.target)[:limit]


@pytest.mark.parametrize("size", [["-n", "512", "-k", "1024"], ["-n", "256", "-k", "512", "--groups=8", "--top_k=2"]])
def test_a_table_of_a_servers_own_kernels(size: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """The complete command, but for the device: both kinds of tables, of the backend's results alone."""
    server_kernels.install_vllm(monkeypatch)
    monkeypatch.setattr(cluster, "find_machine", lambda *asked: H200)
    monkeypatch.setattr(session, "toolchain", lambda machine: {"triton": "3.6.0", "device": "NVIDIA H200"})
    monkeypatch.setattr(session, "GpuEvaluator", ScriptedEvaluator)
    subject = "E=8,N=256" if len(size) > 4 else "N=512,K=1024"
    name = f"{subject},device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    words = ["--for", "vllm", *size, "-m", "16", "--family", "a8w8_blockscale", "--algorithms", "12"]
    for other in ("NVIDIA_H100", "AMD_Instinct_MI300X"):
        assert tune.main([*words, "-o", str(tmp_path / name.replace("NVIDIA_H200", other))]) == 2
        assert f"the table's name says {other}, and this run is for H200 (sm90)" in capsys.readouterr().err
    assert tune.main([*words, "-o", str(tmp_path / name)]) == 0
    assert "its own kernels race" in capsys.readouterr().err
    reported = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    assert reported["16"]["BLOCK_SIZE_M"] == 16 and reported["16"]["BLOCK_SIZE_K"] == 128
    results = (tmp_path / name).with_suffix(".yaml").read_text(encoding="utf-8")
    assert '"backend": "vllm"' in results and '"backend": "triton"' not in results
    assert not [*tmp_path.rglob("*kernels/*.py")]
