"""Stage: Problems, Configs → Built, in parallel, with no GPU touched.

joblib's threads each drive one compiler process. A compile that crashes or outlasts its limit takes its process with it
and costs that config alone; one that crashed gets a second chance, for memory may have been short. Artefacts lie in a
content-addressed cache: what a binary depends on is hashed into its folder's name, so a second run of the same space, of
another size or on a GPU node, compiles nothing.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tritongemm import registry
from tritongemm.config import Config
from tritongemm.errors import InputError, OutputError
from tritongemm.trial import Built
from tritongemm.worker import Child, ChildDied, ChildError, ChildTimeout

_BUILT = "built.json"
GIVES_WAY = 5  # niceness of compilers: what plans, searches and times goes first, for they all wait for it
_ROOM = 64 << 20  # bytes a compiler may need for its files; nvcc keeps a few stages of a large source


@dataclass(frozen=True)
class Job:
    """One thing to compile.

    Attributes:
        config: the candidate.
        identity: everything the binary depends on, JSON values only; its hash names the artefact.
        payload: what the compiler process needs beside that, e.g. the path of the generated module.
    """

    config: Config
    identity: dict[str, Any] = field(hash=False)
    payload: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:40]


class Cache:
    """Compiled kernels by content hash.

    Args:
        folder: created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def get(self, digest: str) -> Built | None:
        """The artefact, or None if there is none or it is damaged."""
        place = self.path(digest)
        try:
            data = json.loads((place / _BUILT).read_text())
            built = Built.from_json({**data, "path": str(place / data["path"]) if data["path"] else ""})
            size = data["launch"].get("bytes")
            return built if not built.path or os.path.getsize(built.path) == size else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError):
            return None

    def put(self, built: Built, code: bytes, name: str) -> Built:
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
            (fresh / _BUILT).write_text(json.dumps(stored.to_json()))
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


def _memory(room: int) -> str | None:
    """A folder in memory with so many bytes free, or None; a container's has 64 MB unless it is asked for more."""
    place = "/dev/shm"
    return place if os.access(place, os.W_OK) and shutil.disk_usage(place).free >= room else None


class Builder:
    """What a compiler process does: build one job and put it into the cache."""

    COLLECTED = 32  # builds between two collections of garbage, which left to itself takes a tenth of the time

    def __init__(self) -> None:
        self._builds = 0
        os.nice(GIVES_WAY)
        gc.disable()

    def __call__(self, request: tuple[Job, str]) -> Iterator[Built | OutputError]:
        self._builds += 1
        if self._builds % self.COLLECTED == 0:
            gc.collect()
            gc.freeze()  # what has lived so long stays
        job, folder = request
        backend = registry.load("backends", job.config.backend)
        started = time.perf_counter()
        built, code, name = backend.build(job)
        try:
            yield Cache(Path(folder)).put(replace(built, seconds=time.perf_counter() - started), code, name)
        except OSError as error:
            yield OutputError(
                f"compiled kernels can't be kept in {folder}: {error.strerror}; make room, or name another folder in "
                "TRITONGEMM_CACHE, and run the same command again"
            )


class Compiler:
    """Compiler processes and the cache they fill.

    Args:
        cache: where artefacts go.
        jobs: processes at a time; 0 for one per core this process may use.
        timeout: seconds one compile may take; a backend's ``COMPILE_SECONDS`` where those are more.
        must_keep: a cache that can't be written is an error, rather than a failed config.
    """

    def __init__(self, cache: Cache, jobs: int = 0, timeout: float = 60.0, must_keep: bool = False) -> None:
        self.cache, self.timeout, self.must_keep = cache, timeout, must_keep
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._idle: SimpleQueue[Child] = SimpleQueue()
        self._again = threading.Lock()  # second chances are given one at a time
        self._closed = False
        # Compilers write and remove a dozen small files for each config; in memory that is a tenth of their time less.
        self._scratch = tempfile.TemporaryDirectory(
            prefix="tritongemm-", dir=_memory(self.jobs * _ROOM), ignore_cleanup_errors=True
        )
        environment = {"TMPDIR": self._scratch.name}
        self._children = [Child("tritongemm.compile:Builder", environment) for _ in range(self.jobs)]
        for child in self._children:
            self._idle.put(child)

    def start(self) -> None:
        """Begin to start the processes where the cache is empty, so that they are ready when the first jobs come."""
        if not any(self.cache.folder.glob("*/*")):
            for child in self._children:
                child.start()

    def build(self, job: Job) -> Built:
        """One job, from the cache or compiled in a child; every failure is a value.

        Raises:
            OutputError: the cache can't be written, and must be.
        """
        cached = self.cache.get(job.digest)
        if cached is not None:
            return replace(cached, config=job.config, seconds=0.0)
        child = self._idle.get()
        try:
            return self._ask(child, job)
        except ChildDied:
            with self._again:
                try:
                    return self._ask(child, job)
                except ChildDied as death:
                    reason = f"the compiler process died: {death}"
                    return Built(job.config, job.digest, status="compile_failed", reason=reason)
        finally:
            self._idle.put(child)

    def _ask(self, child: Child, job: Job) -> Built:
        """What a child makes of one job.

        Raises:
            ChildDied: instead of answering.
            OutputError: the cache can't be written, and must be.
        """
        if self._closed:
            raise ChildDied("stopped")
        failed = Built(job.config, job.digest, status="compile_failed")
        backend = registry.load("backends", job.config.backend)
        limit = max(self.timeout, getattr(backend, "COMPILE_SECONDS", 0.0))
        try:
            answer: Built | OutputError
            (answer,) = child.ask((job, str(self.cache.folder)), limit)
            if isinstance(answer, OutputError):
                if self.must_keep:
                    raise answer
                return replace(failed, reason=str(answer))
            return replace(answer, config=job.config)
        except ChildTimeout:
            return replace(failed, status="timeout", reason=f"compile took more than {limit:g} s")
        except ChildError as error:
            return replace(failed, reason=str(error))

    def stream(self, jobs: Iterable[Job], until: float = inf) -> Iterator[Built]:
        """Builds as they finish; what is cached comes at once, while `jobs` are still being made. Equal jobs are built
        once, for the config of their first.

        Args:
            jobs: what to build.
            until: no compile begins after this, by time.monotonic.
        """
        import joblib

        waiting: list[Job] = []
        seen: set[str] = set()
        for job in jobs:
            if job.digest in seen:
                continue
            cached = self.cache.get(job.digest)
            if cached is None:
                seen.add(job.digest)
                waiting.append(job)
            else:
                yield replace(cached, config=job.config, seconds=0.0)
        if waiting:
            pool = joblib.Parallel(n_jobs=self.jobs, backend="threading", return_as="generator_unordered", batch_size=1)
            in_time = itertools.takewhile(lambda job: time.monotonic() <= until, waiting)
            yield from pool(joblib.delayed(self.build)(job) for job in in_time)

    def close(self) -> None:
        """End all compiler processes; threads that still wait for one give up."""
        self._closed = True
        for child in self._children:
            child.kill()
        self._scratch.cleanup()
