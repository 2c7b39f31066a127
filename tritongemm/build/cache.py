"""Caches compiled kernels on disk, by content hash."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError
from tritongemm.system.compiled_files import CompiledEntry, CompiledFiles


class ArtifactCache:
    """Compiled kernels by content hash; `system.compiled_files` decides whose files are used.

    Raises:
        OutputError: of each method, another user could replace what is in the folder, or it can't be written.
        InputError: of each method, TRITONGEMM_CACHE_TRUST names no user.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = CompiledFiles(folder)

    def check(self) -> None:
        """Check that the folder can be used, before anything is compiled."""
        self._files.find("")

    def sweep(self) -> None:
        """Remove files of processes that were killed while they stored something."""
        self._files.sweep()

    def get(self, digest: str) -> Artifact | None:
        """Return the artefact, or None if there is none, it is damaged, or its owner is no trusted user."""
        entry = self._files.find(digest)
        return _artifact(entry) if entry else None

    def put(self, built: Artifact, code: bytes, name: str) -> Artifact:
        """Store an artefact, and return what is there: another process may have compiled it to other bytes before."""
        stored = replace(built, path=name, sha256=sha256(code).hexdigest()) if code else replace(built, path="")
        entry = self._files.keep(built.digest, {name: code} if code else {}, stored.to_json(), _artifact)
        kept = _artifact(entry)
        assert kept is not None, "what is kept is usable"
        return replace(kept, config=built.config)


def _artifact(entry: CompiledEntry) -> Artifact | None:
    """Return the artifact of an entry, or None where another version wrote it differently."""
    name = next(iter(entry.files), "")
    try:
        return replace(Artifact.from_json(entry.facts), path=str(entry.path / name) if name else "")
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None
