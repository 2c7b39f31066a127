"""Compiled kernels on disk, by content hash."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError

_BUILT = "built.json"


class ArtifactCache:
    """Compiled kernels by content hash.

    Args:
        folder: created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """The folder of one artifact."""
        return self.folder / digest[:2] / digest

    def get(self, digest: str) -> Artifact | None:
        """The artefact, or None if there is none or it is damaged."""
        place = self.path(digest)
        try:
            data = json.loads((place / _BUILT).read_text(encoding="utf-8"))
            built = Artifact.from_json({**data, "path": str(place / data["path"]) if data["path"] else ""})
            size = data["launch"].get("bytes")
            return built if not built.path or os.path.getsize(built.path) == size else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError):
            return None

    def put(self, built: Artifact, code: bytes, name: str) -> Artifact:
        """Store an artefact; readers see all of it or nothing.

        Raises:
            OSError: the folder can't be written.
        """
        place = self.path(built.digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        stored = replace(built, path=name if code else "", launch={**built.launch, "bytes": len(code)})
        try:
            if code:
                (fresh / name).write_bytes(code)
            (fresh / _BUILT).write_text(json.dumps(stored.to_json()), encoding="utf-8")
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        try:
            os.rename(fresh, place)
        except OSError:  # another process was first, or a damaged entry is in the way
            if self.get(built.digest) is None:
                shutil.rmtree(place, ignore_errors=True)
                os.rename(fresh, place)
            else:
                shutil.rmtree(fresh)
        return replace(built, path=str(place / name) if code else "")
