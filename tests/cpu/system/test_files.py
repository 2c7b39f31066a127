"""Texts that are replaced at once, and what is reported where that is not possible."""

from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.core.errors import OutputError
from tritongemm.system import files, temporary_folder


@each(("name", "advice"), [("tritongemm-x", temporary_folder.TEMPORARY_ADVICE), ("mine", files.ADVICE)])
def test_a_full_folder_of_temporary_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    """No other -o makes room there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / name).write_text("no folder")
    with pytest.raises(OutputError) as refused:
        files.atomic_write(tmp_path / name / "module.py", "text")
    assert str(refused.value).endswith(f"; {advice}")
