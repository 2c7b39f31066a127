from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakes.blaslt_library import stand_in
from tritongemm.hip_ext.blaslt.library import Library


@pytest.fixture(params=["nvidia", "amd"])
def library(request: pytest.FixtureRequest, blaslt_libraries: Path, tmp_path: Path) -> Iterator[Library]:
    with stand_in(blaslt_libraries, request.param, tmp_path) as found:
        yield found
