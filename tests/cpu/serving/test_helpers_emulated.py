"""The kernels beside the products on an emulated AMD GPU."""

from pathlib import Path

import pytest

from tests.support import emulated


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_they_quantise_sort_and_combine_as_pytorch_does(arch: str, tmp_path: Path) -> None:
    emulated.run_helpers(tmp_path, arch)
