import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.here import needed_fp8
from tests.support.nouns import Capsys, Config, Groups, Machine, Problem, matrices, registry, results_format
from tritongemm.cli import tune
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Family, LibraryBackend

SERVERS = ("vllm", "sglang")
NAMES = {"vllm": "128,128", "sglang": "128, 128"}
FAMILY = registry.get(Family, "a8w8_blockscale")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"the {name} package is not installed")
    return name


@pytest.mark.parametrize("counts", [(), (7, 0, 133, 1, 0, 64, 20, 3), (1, *[0] * 14, 1)])
@pytest.mark.parametrize("m", [1, 33, 256])
def test_what_is_tried_is_right(gpu_machine: Machine, server: str, m: int, counts: tuple[int, ...]) -> None:
    dtype = needed_fp8(gpu_machine.target)
    groups = Groups(len(counts), spread="captured", counts=counts) if counts else None
    problem = FAMILY.problem(
        Problem(sum(counts) or m, 520, 640, *matrices(dtype, c="bf16", layout="TN"), groups=groups)
    )
    backend = registry.get(LibraryBackend, server)
    if not backend.supports(problem, gpu_machine.target):
        pytest.skip("not for this GPU")
    operands = FAMILY.make_inputs(problem, "cuda")
    operands["c"] = torch.empty((problem.m, problem.n), dtype=torch.bfloat16, device="cuda")
    exact = FAMILY.reference(problem, operands)
    tried: list[Config] = backend.list_algorithms(problem, operands)
    ran = 0
    for config in [*tried[:4], *tried[4 :: max(1, len(tried) // 6)]]:
        call = backend.operation(problem, operands, config)
        if call is None:
            continue
        operands["c"].fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        assert deviation(operands["c"], exact) < FAMILY.tolerance(problem), config.name
        ran += 1
    assert ran > 3


@pytest.mark.parametrize("experts", [False, True], ids=["product", "experts"])
def test_a_table_is_written_of_its_own_kernels(
    gpu_machine: Machine, tmp_path: Path, server: str, experts: bool, capsys: Capsys
) -> None:
    needed_fp8(gpu_machine.target)
    subject = "E=8,N=256" if experts else "N=512,K=1024"
    name = f"{subject},device_name=any,dtype=fp8_w8a8,block_shape=[{NAMES[server]}].json"
    size = ["-n", "256", "-k", "512", "--groups", "8", "--top_k", "2"] if experts else ["-n", "512", "-k", "1024"]
    words = ["--for", server, *size, "-m", "16", "--family", "a8w8_blockscale", "--algorithms", "8"]
    assert tune.main([*words, "-o", str(tmp_path / name)]) == 0
    assert "its own kernels race" in capsys.readouterr().err
    (written,) = (path for path in tmp_path.glob("*.json") if path.name.startswith(subject))
    row = json.loads(written.read_text(encoding="utf-8"))["16"]
    assert set(row) >= {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
    results = (tmp_path / name).with_suffix(results_format().suffixes[0]).read_text(encoding="utf-8")
    assert f'"backend": "{server}"' in results and '"backend": "triton"' not in results
