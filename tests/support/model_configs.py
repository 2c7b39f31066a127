from collections.abc import Iterator

import pytest

from tritongemm.workloads import meta_model


@pytest.fixture(scope="module", autouse=True)
def without_transformers() -> Iterator[None]:
    """Tests of the table of known architectures, and quick ones: importing transformers takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta_model, "has_transformers", lambda: False)
        yield
