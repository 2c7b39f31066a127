"""The listening runtime that records launches: compiled once, and loaded only as it was compiled."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tritongemm.export import launch_plans
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.search_spaces import loader as target_files


@dataclass
class StandIn:
    """A compiler whose library is its source."""

    version: str = "stand-in 1.0"
    compiled: list[bytes] = field(default_factory=list)

    def library(self, source: str, options: tuple[str, ...], seconds: float) -> bytes:
        """The text as bytes."""
        self.compiled.append(source.encode())
        return self.compiled[-1]


def test_a_recorder_that_was_replaced_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, facts = StandIn(), target_files.load_target("gfx942")
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(hip_compiler, "compiler", lambda arch: compiler)
    path, sha256 = launch_plans._runtime(facts)
    assert launch_plans._runtime(facts) == (path, sha256) and len(compiler.compiled) == 1
    library = Path(path)
    library.write_bytes(b"planted")
    assert launch_plans._runtime(facts) == (path, sha256) and len(compiler.compiled) == 2
    assert library.read_bytes() == compiler.compiled[0]
    library.unlink()
    library.symlink_to(tmp_path / "elsewhere.so")
    assert launch_plans._runtime(facts) == (path, sha256) and not library.is_symlink()
