"""Generated modules are where others may write: people read them, and no process of ours runs them."""

from pathlib import Path

from tests.support.nouns import Patch
from tritongemm.cli import tune
from tritongemm.codegen import modules
from tritongemm.system import files


def test_what_others_put_beside_modules_is_not_run(tmp_path: Path, monkeypatch: Patch, without_gpu: None) -> None:
    """A line is added to each module as soon as it is written, before a compiler or the interpreter could read it."""
    trace = tmp_path / "was_run"

    def write(path: Path, text: str) -> None:
        planted = f"\nopen({str(trace)!r}, 'w').close()\n" if path.parent.name == "out_kernels" else ""
        files.atomic_write(path, text + planted)

    monkeypatch.setattr(modules, "atomic_write", write)
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    size = ["-m", "16", "-n", "16", "-k", "32", "--target", "gfx942", "--libtype", "triton"]
    options = ["--keep", "--budget", "1", "--num_threads", "1", "-o", str(tmp_path / "out.yaml")]
    assert tune.main([*size, *options]) == 0
    (module,) = (tmp_path / "out_kernels").glob("generated_kernel_*.py")
    assert "was_run" in module.read_text() and not trace.exists()
