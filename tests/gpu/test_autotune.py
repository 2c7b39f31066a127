"""`tritongemm.autotune` on a GPU: results are measured, and serve calls of the process that tuned them."""

from pathlib import Path

import tritongemm
from tritongemm.hip_ext.machine import Machine
from tritongemm.report.progress import RunProgress

M, N, K = 16, 520, 1032


def test_results_serve_at_once(gpu_machine: Machine, tmp_path: Path) -> None:
    import torch

    seen: list[RunProgress] = []
    results = tritongemm.autotune([(M, N, K)], effort="quick", output=tmp_path / "out.yaml", progress=seen.append)
    (record,) = results
    assert not record.predicted and record.library_seconds and record.target == gpu_machine.target.name
    assert (seen[-1].done, seen[-1].total) == (1, 1) and "library us" in str(results)
    assert str(results.load()).startswith("1 of 1 rows serve")
    x, w = (torch.randn(rows, K, device="cuda", dtype=torch.bfloat16) for rows in (M, N))
    with torch.no_grad():
        assert tritongemm.explain(x, w).startswith(("exact", "library"))
        torch.testing.assert_close(tritongemm.mm(x, w), torch.nn.functional.linear(x, w), rtol=2e-2, atol=0.5)
