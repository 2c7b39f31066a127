"""What tests of results share."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The results of a run, which are not there yet."""
    return tmp_path / "out.yaml"
