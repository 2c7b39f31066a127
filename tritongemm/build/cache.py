"""Compiled kernels on disk, by content hash."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError
from tritongemm.system.compiled_files import CompiledEntry, CompiledFiles


class ArtifactCache:
    """Compiled kernels by content hash; whose are used is said in `system.compiled_files`.

    Args:
        folder: created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = CompiledFiles(folder)

    def check(self) -> None:
        """Find out whether the folder can be used, before anything is compiled.

        Raises:
            OutputError: anybody could replace what is in the folder.
            InputError: TRITONGEMM_CACHE_TRUST names nobody.
        """
        self._files.find("")

    def sweep(self) -> None:
        """Remove what processes left that were killed while they stored something."""
        self._files.sweep()

    def get(self, digest: str) -> Artifact | None:
        """The artefact, or None if there is none, it is damaged, or its owner is nobody who is trusted.

        Raises:
            OutputError: anybody could replace what is in the folder.
            InputError: TRITONGEMM_CACHE_TRUST names nobody.
        """
        entry = self._files.find(digest)
        return _artifact(entry) if entry else None

    def put(self, built: Artifact, code: bytes, name: str) -> Artifact:
        """Store an artefact; readers see all of it or nothing.

        Returns:
            What is there: two processes may have compiled the same to different bytes, and both get the first one's.

        Raises:
            OutputError: it can't be kept in the folder, or anybody could replace it there.
            InputError: TRITONGEMM_CACHE_TRUST names nobody.
        """
        stored = replace(built, path=name, sha256=sha256(code).hexdigest()) if code else replace(built, path="")
        entry = self._files.keep(built.digest, {name: code} if code else {}, stored.to_json(), _artifact)
        kept = _artifact(entry)
        assert kept is not None, "what is kept is usable"
        return replace(kept, config=built.config)


def _artifact(entry: CompiledEntry) -> Artifact | None:
    """What an entry holds, or None where another version kept something else."""
    name = next(iter(entry.files), "")
    try:
        return replace(Artifact.from_json(entry.facts), path=str(entry.path / name) if name else "")
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None
