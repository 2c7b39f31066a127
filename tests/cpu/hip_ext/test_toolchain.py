"""Compilers that are run: what they refuse, and what is not their fault."""

from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.core.errors import InputError, ToolKilledError
from tritongemm.hip_ext.compilers import toolchain


def tool(folder: Path, ends: str, times: int) -> list[str]:
    """A command that ends so the first times that it is run, and well after that."""
    script = folder / "tool"
    script.write_text(
        f"""#!/bin/sh
echo run >> {folder}/runs
[ $(wc -l < {folder}/runs) -gt {times} ] && echo version 1 && exit 0
{ends}
"""
    )
    script.chmod(0o755)
    return [str(script)]


@each(
    "ends",
    ["kill -9 $$", "kill -15 $$", "echo 'nvcc error : cicc died due to signal 9' >&2; exit 9",
     "echo 'clang: error: unable to execute command: Killed' >&2; exit 254"],
)  # fmt: skip
def test_a_compiler_that_is_killed_is_run_again(tmp_path: Path, ends: str) -> None:
    """Its source is not to blame, and no kernel is remembered as one that does not compile."""
    assert toolchain.first_line(tool(tmp_path, ends, 1)) == "version 1"
    (tmp_path / "runs").unlink()
    with pytest.raises(ToolKilledError, match="tool was killed 2 times"):
        toolchain.run(tool(tmp_path, ends, 9), 5.0)


def test_a_compiler_that_refuses_is_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tool refuses the source: error: no such thing"):
        toolchain.run(tool(tmp_path, "echo 'error: no such thing' >&2; exit 1", 9), 5.0)
    assert (tmp_path / "runs").read_text() == "run\n"
