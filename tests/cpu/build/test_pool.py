import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.nouns import Artifact, ArtifactCache, BuildPool, CompileJob, Config, OutputError, fails, load_target
from tritongemm import backends

TOY = """
import os, signal, time
from pathlib import Path
from tests.support.toys.backend_toy import ToyBackend
from tritongemm.core.artifact import Artifact

class Toy(ToyBackend):
    def _compile(self, job):
        what = job.payload.get("what", "build")
        if "log" in job.payload:
            with open(job.payload["log"], "a") as log:
                log.write(job.config.name + "\\n")
        if what == "crash once" and not Path(job.payload["pid"]).exists():
            Path(job.payload["pid"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fault":
            import ctypes
            ctypes.string_at(0)
        if what == "hang":
            if os.fork() == 0:
                Path(job.payload["pid"]).write_text(str(os.getpid()))
            while True:
                signal.pause()
        if what == "raise":
            raise ValueError("tile too large for toys")
        if what == "exit":
            os._exit(5)
        if what == "full disk":
            raise OSError(28, "No space left on device")
        if what == "moved":
            return Artifact(job.config, job.digest, status="compile_failed", reason="moved", try_again=True), b"", ""
        if what == "too large":
            return Artifact(job.config, job.digest, status="out_of_resources", reason="LDS 9 > 8"), b"", ""
        artifact = Artifact(job.config, job.digest, symbol=job.config.name, registers=3)
        return artifact, job.config.name.encode(), "kernel.toy"
"""


@pytest.fixture(scope="module", autouse=True)
def toy_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A backend whose compiler misbehaves on request; the compiler processes import `toy_roles` to find it."""
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toycompiler.py").write_text(TOY)
    hook = tmp_path_factory.mktemp("site")
    (hook / "toy_site.py").write_text(f"import tritongemm.backends as b\nb.__path__.append({str(folder)!r})\n")
    (hook / "toy_roles.py").write_text("import toy_site\nfrom tritongemm.build.pool import CompilerWorker\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
        patch.syspath_prepend(str(hook))
        patch.setattr(BuildPool, "ROLE", "toy_roles:CompilerWorker")
        yield
    sys.modules.pop("tritongemm.backends.toycompiler", None)


def compiler(folder: Path, jobs: int = 2, timeout: float = 60.0) -> BuildPool:
    """A compiler whose processes know the toy backend."""
    return BuildPool(ArtifactCache(folder), jobs, timeout)


def job(number: int, what: str = "build", **payload: str) -> CompileJob:
    config = Config("toy", 16, 16, 16, group_m=number, backend="toycompiler")
    return CompileJob(config, {"toy": config.name}, {"what": what, **payload})


def test_one_bad_config_costs_itself(tmp_path: Path) -> None:
    """Killed, faulting, hanging, raising or leaving: each is a value with its reason, and the rest are built."""
    pid = tmp_path / "pid"
    bad = {1: "crash", 3: "fault", 5: "hang", 7: "raise", 9: "exit", 11: "too large", 2: "full disk", 4: "moved"}
    jobs = [job(n, bad.get(n, "build"), pid=str(pid)) for n in range(13)]
    made = compiler(tmp_path / "cache", timeout=1.0)
    try:
        list(made.stream([job(20), job(21)]))  # started, so that the limit is the compile's own
        found = {b.config.group_m: b for b in made.stream(jobs)}
    finally:
        made.close()
    assert sorted(found) == list(range(13))
    assert all(
        b.status == "ok" and Path(b.path).read_bytes() == b.symbol.encode() for n, b in found.items() if n not in bad
    )
    reported = {n: (found[n].status, found[n].reason) for n in bad}
    assert reported[1] == ("compile_failed", "the compiler process died: signal SIGKILL")
    assert reported[3][0] == "compile_failed" and "signal SIGSEGV" in reported[3][1]
    assert reported[5] == ("timeout", "compile took more than 1 s")
    assert reported[7] == ("compile_failed", "ValueError: tile too large for toys")
    assert reported[9] == ("compile_failed", "the compiler process died: exit status 5")
    assert reported[11] == ("out_of_resources", "LDS 9 > 8")
    assert reported[2] == ("compile_failed", "OSError: [Errno 28] No space left on device")
    passing = {n for n in found if found[n].try_again}
    assert passing == {1, 2, 4, 5}, "killed from outside, disk full, file moved, too late: not the config's fault"
    assert not any(made.cache.get(found[n].digest) for n in passing), "nor remembered"
    killed, until = Path(f"/proc/{pid.read_text()}/cmdline"), time.monotonic() + 5
    while killed.exists() and killed.read_bytes() and time.monotonic() < until:  # one that is killed takes its time
        time.sleep(0.01)
    assert not killed.exists() or not killed.read_bytes()


def test_a_compiler_that_died_by_chance_gets_a_second_one(tmp_path: Path) -> None:
    made = compiler(tmp_path / "cache", jobs=1)
    try:
        (built,) = made.stream([job(1, "crash once", pid=str(tmp_path / "died"))])
        assert (built.status, built.symbol) == ("ok", built.config.name) and (tmp_path / "died").exists()
    finally:
        made.close()


def test_failures_are_not_cached(tmp_path: Path) -> None:
    """A compile that failed may have failed for want of memory: the next run tries again."""
    made = compiler(tmp_path / "cache", jobs=1)
    try:
        assert made.build(job(1, "raise")).status == "compile_failed" and made.build(job(1)).status == "ok"
    finally:
        made.close()


def test_no_process_starts_before_there_is_a_job_for_it(tmp_path: Path) -> None:
    with closing(compiler(tmp_path / "cache", jobs=10**6)) as made:
        assert made._children == [] and [built.status for built in made.stream([job(1)])] == ["ok"]
        assert len(made._children) == 1
    with closing(compiler(tmp_path / "other", jobs=8)) as made:
        made.start(["triton"], load_target("gfx942"), most=1)
        assert len(made._children) == 1


def test_equal_jobs_are_built_once_however_many_write_an_entry(tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs = [job(n % 3, "too large" if n % 3 == 2 else "build", log=str(log)) for n in range(9)]
    made = compiler(tmp_path / "cache")
    try:
        first = {b.config: b for b in made.stream(jobs)}
        assert len(first) == 3 == len(log.read_text().splitlines()) and all(b.seconds > 0 for b in first.values())
        again = {b.config: b for b in made.stream(jobs)}
        assert len(log.read_text().splitlines()) == 3, "what does not fit is remembered as well"
        assert again == {c: replace(b, seconds=0.0, launch=again[c].launch) for c, b in first.items()}
        assert made.build(jobs[0]).seconds == 0.0
    finally:
        made.close()
    cache = ArtifactCache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        (place,) = {Path(b.path).parent for b in pool.map(lambda _: put(cache), range(32))}
    assert cache.get(job(0).digest) and [p.name for p in place.parent.iterdir()] == [place.name]


def put(cache: ArtifactCache, number: int = 0) -> Artifact:
    one = job(number)
    return cache.put(
        Artifact(one.config, one.digest, symbol="toy", launch={"offsets": [0, 8]}), b"machine code", "kernel.toy"
    )


def test_who_compiles_the_same_later_gets_what_is_there(tmp_path: Path) -> None:
    """Two processes may have compiled one kernel at once, to different bytes; both record the file that is kept."""
    first = put(ArtifactCache(tmp_path))
    second = ArtifactCache(tmp_path).put(replace(first, path="", sha256=""), b"other machine code", "kernel.toy")
    assert second == first and Path(second.path).read_bytes() == b"machine code"
    assert hashlib.sha256(Path(second.path).read_bytes()).hexdigest() == second.sha256


def edited(text: str, **changes: object) -> bytes:
    built = {**json.loads(text), **changes}
    built.pop("sha256")
    own = hashlib.sha256(json.dumps(built, sort_keys=True).encode()).hexdigest()
    return json.dumps({**built, "sha256": own}).encode()


def damaged(place: Path) -> Iterator[str]:
    """Ways an entry can be damaged; each is undone by writing the entry anew."""
    code, facts = place / "kernel.toy", place / "built.json"
    text = facts.read_text()
    for name, path, data in (
        ("code cut short", code, b"machine"),
        ("code empty", code, b""),
        ("facts cut short", facts, text[: len(text) // 2].encode()),
        ("facts empty", facts, b""),
        ("facts of another kind", facts, b"[]"),
        ("facts without their parts", facts, b"{}"),
        ("facts that are null", facts, b"null"),
        ("code with another byte", code, b"machine bode"),
        ("facts with another value", facts, text.replace('"offsets": [0, 8]', '"offsets": [0, 9]').encode()),
        ("another entry's facts", facts, edited(text, key="0" * 40)),
        ("facts without a hash", facts, json.dumps({**json.loads(text), "sha256": None}).encode()),
        ("a file elsewhere", facts, edited(text, files={str(code): hashlib.sha256(b"machine code").hexdigest()})),
        ("a file above", facts, edited(text, files={"../kernel.toy": hashlib.sha256(b"machine code").hexdigest()})),
        ("launch lost", facts, text.replace('{"offsets": [0, 8]}', "null").encode()),
        ("no config", facts, edited(text, facts=json.loads(text)["facts"] | {"config": "tile"})),
        ("not text", facts, b"\xff\xfe"),
    ):
        path.write_bytes(data)
        yield name
    code.unlink()
    yield "code gone"


def test_a_damaged_entry_is_rebuilt(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    entire = put(cache)
    assert cache.get(entire.digest) == entire and entire.sha256 == hashlib.sha256(b"machine code").hexdigest()
    place = Path(entire.path).parent
    for name in damaged(place):
        assert cache.get(entire.digest) is None, name
        assert put(cache).path == entire.path
        assert cache.get(entire.digest), name
    assert [p.name for p in place.parent.iterdir()] == [place.name], "no debris"


def test_no_damage_to_the_facts_is_an_exception(tmp_path: Path) -> None:
    """Whatever byte turns over, the cache answers: the complete artifact, or None."""
    cache = ArtifactCache(tmp_path)
    entire = put(cache)
    facts = Path(entire.path).with_name("built.json")
    text, rng = facts.read_bytes(), random.Random(1)
    for _ in range(200):
        at = rng.randrange(len(text))
        facts.write_bytes(text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :])
        assert cache.get(job(0).digest) in (None, entire)


def test_a_cache_that_can_not_be_written_is_no_fault_of_the_config(tmp_path: Path) -> None:
    """A tuning run ends with it, and remembers nothing; others get the reason."""
    (tmp_path / "file").write_text("")
    made = compiler(tmp_path / "file" / "cache", jobs=1)
    try:
        built = made.build(job(0))
        assert built.status == "compile_failed" and "can't be kept in" in built.reason
        made.must_keep = True
        fails(OutputError, r"can't be kept in .*: Not a directory; make room, or name another fol", made.build, job(0))
        fails(OutputError, "", list, made.stream([job(0), job(1)]))
    finally:
        made.close()


def test_processes_are_warm_before_the_first_job(tmp_path: Path) -> None:
    """They load the compiler while the first job is still being made; what one has loaded is used again."""
    target = load_target("gfx942")
    with closing(BuildPool(ArtifactCache(tmp_path), jobs=2)) as pool:
        pool.start(["triton", "torch"], target, most=9)
        with pool._lent_child() as first, pool._lent_child() as second:
            assert first is not second and first.alive and second.alive
        with pool._lent_child() as again:
            assert again is first, "the last one used goes first"
        (tmp_path / "ab").mkdir()
        (tmp_path / "ab" / "cd").touch()
    with closing(BuildPool(ArtifactCache(tmp_path), jobs=1)) as pool:
        pool.start(["triton"], target, most=9)
        assert not pool._children, "what is cached needs no compiler"


def test_a_warm_up_that_fails_costs_nothing(tmp_path: Path) -> None:
    with closing(compiler(tmp_path, jobs=1)) as pool:
        pool.start(["abacus"], load_target("gfx942"), most=1)
        made = pool.build(job(1))
    assert made.status == "ok", made.reason
