"""Jobs that are built while others are still being made."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import JobStream
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config

LIMIT = 20.0  # seconds for what should take none


def job(number: int) -> CompileJob:
    config = Config("toy", 16, 16, 16, group_m=number)
    return CompileJob(config, {"toy": config.name}, {})


def stream(folder: Path, build: "Builder", until: float = float("inf"), first: tuple[str, ...] = ()) -> JobStream:
    return JobStream(ArtifactCache(folder), build, 1, until, lambda digest: digest not in first)


class Builder:
    """Builds at once, and notes what; `held` numbers wait until they may go on."""

    def __init__(self, *held: int) -> None:
        self.order: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.held = held

    def __call__(self, job: CompileJob) -> Artifact:
        self.order.append(job.config.group_m)
        if job.config.group_m in self.held:
            self.begun.set()
            assert self.go_on.wait(LIMIT)
        return Artifact(job.config, job.digest)


def test_builds_begin_while_jobs_are_still_being_made(tmp_path: Path) -> None:
    reported = threading.Event()

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert reported.wait(LIMIT), "the first is not built before there is a second"
        yield job(2)

    built = stream(tmp_path, Builder()).artifacts(jobs())
    assert next(built).config.group_m == 1
    reported.set()
    assert [b.config.group_m for b in built] == [2]


def test_jobs_of_a_lower_turn_go_before_others_that_wait(tmp_path: Path) -> None:
    builder = Builder(1)

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert builder.begun.wait(LIMIT)
        yield from map(job, (2, 3, 4, 5))
        builder.go_on.set()

    found = list(stream(tmp_path, builder, first=(job(4).digest, job(5).digest)).artifacts(jobs()))
    assert builder.order == [1, 4, 5, 2, 3] == [b.config.group_m for b in found]


def test_equal_jobs_are_built_once_while_the_first_is_under_way(tmp_path: Path) -> None:
    builder = Builder(1)

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert builder.begun.wait(LIMIT)
        yield job(1)
        builder.go_on.set()

    assert len(list(stream(tmp_path, builder).artifacts(jobs()))) == 1 and builder.order == [1]


def test_what_was_not_kept_is_built_again_when_it_is_asked_for_later(tmp_path: Path) -> None:
    """Nothing waits for ever for an artifact that was reported before it was asked for."""
    reported = threading.Event()

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert reported.wait(LIMIT)
        yield job(1)

    built = stream(tmp_path, builder := Builder()).artifacts(jobs())
    next(built)
    reported.set()
    assert len(list(built)) == 1 and builder.order == [1, 1]


def test_nothing_begins_when_the_time_is_spent(tmp_path: Path) -> None:
    assert list(stream(tmp_path, builder := Builder(), until=0.0).artifacts(map(job, range(5)))) == []
    assert builder.order == []


@each("who", ["builder", "jobs"])
def test_errors_end_the_stream(tmp_path: Path, who: str) -> None:
    class Failing(Builder):
        def __call__(self, job: CompileJob) -> Artifact:
            raise OSError("builder")

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        raise OSError("jobs")

    made = iter([job(1)]) if who == "builder" else jobs()
    with pytest.raises(OSError, match=who):
        list(stream(tmp_path, Failing() if who == "builder" else Builder()).artifacts(made))
