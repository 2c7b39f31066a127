"""Campaigns that run commands as processes: bad command lines, hostile results, kills, and disks that fill."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.torture import hostile
from tests.torture.campaigns import Campaign
from tests.torture.commands import Command, Ended, processes_with
from tests.torture.damage import damaged
from tests.torture.outcome import Outcome

# The target with the smallest space, and shapes that share their binaries, so that a run takes seconds.
_TARGET = ("--target", "gfx1100")
_SIZES = "".join(f"- {{M: {m}, N: 16, K: 16}}\n" for m in (16, 8, 5, 3))
_TUNE = ("--gemm_size_file", "sizes.yaml", "-o", "out.yaml", "--budget", "2", "--num_threads", "2", *_TARGET)
_AFTER_KILL_SECONDS = 10.0  # a process of ours may live so long after its parent was killed
_MARKER = "TRITONGEMM_TORTURE"  # a variable that every process of a try inherits


@dataclass(frozen=True)
class Job:
    module: str
    argv: tuple[str, ...]
    results: tuple[str, ...] = ()  # paths of files that must be equal however often it was disturbed

    def left(self, folder: Path) -> tuple[bytes, ...]:
        """The contents of its results; nothing for one that is not there."""
        return tuple(path.read_bytes() if path.exists() else b"" for path in (folder / name for name in self.results))


JOBS = (
    Job("tune", _TUNE, ("out.yaml",)),
    Job("tune", (*_TUNE, "--generate_only", "--keep"), ("out_kernels/generated_kernel_16_16_16.py",)),
    Job("tune", ("--gemm_size_file", "tuned.yaml", "--compare_wo_tuning", *_TARGET)),
    Job("tune", ("--gemm_size_file", "tuned.yaml", "--benchmark", *_TARGET)),
    Job("export", ("tuned.yaml", "-o", "library", *_TARGET), ("library/kernels.csv",)),
    Job("launch-plan", ("-m", "16", "-n", "16", "-k", "16", "-o", "plans", *_TARGET), ("plans/plan_0.json",)),
)


class Undisturbed:
    """What the tries of several campaigns start from: files, a cache of compiled kernels, and what each job leaves."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._left: dict[Job, tuple[bytes, ...]] = {}
        self._guard = threading.RLock()

    def prepare(self, folder: Path) -> None:
        """Tune undisturbed, unless that was done."""
        if self._folder is not None:
            return
        self._folder = folder
        (folder / "start").mkdir()
        (folder / "start" / "sizes.yaml").write_text(_SIZES)
        (results,) = self.left(JOBS[0])
        (folder / "start" / "tuned.yaml").write_bytes(results)

    def left(self, job: Job) -> tuple[bytes, ...]:
        """What an undisturbed run of a job leaves; it is run when this is first asked."""
        with self._guard:
            if job not in self._left:
                work = self.new(self._place / f"undisturbed-{len(self._left)}")
                ended = Command(job.module, job.argv, work, self.environment(work)).end().checked()
                if ended.status:
                    raise ended.failure("an undisturbed command fails")
                self._left[job] = job.left(work)
            return self._left[job]

    @property
    def _place(self) -> Path:
        assert self._folder is not None, "prepare comes first"
        return self._folder

    def new(self, folder: Path) -> Path:
        shutil.copytree(self._place / "start", folder, dirs_exist_ok=True)
        (folder / "tmp").mkdir()
        return folder

    def environment(self, folder: Path) -> dict[str, str]:
        return {"TRITONGEMM_CACHE": str(self._place / "cache"), "TMPDIR": str(folder / "tmp"), _MARKER: str(folder)}


class CommandCampaign(Campaign):
    """A campaign whose tries start commands, from what undisturbed ones left."""

    def __init__(self, undisturbed: Undisturbed) -> None:
        self._undisturbed = undisturbed

    def prepare(self, folder: Path) -> None:
        """Run every job undisturbed, unless another campaign has."""
        self._undisturbed.prepare(folder)

    def _start(
        self, job: Job, folder: Path, variables: Mapping[str, str] | None = None, file_bytes: int = 0
    ) -> Command:
        environment = {**self._undisturbed.environment(folder), **(variables or {})}
        return Command(job.module, job.argv, folder, environment, file_bytes)

    def _finish(self, job: Job, folder: Path, before: Ended) -> None:
        """Run a disturbed command again: it ends, with the files of an undisturbed run, and leaves nothing behind."""
        ended = self._start(job, folder).end().checked()
        if ended.status:
            raise ended.failure(f"after {before.argv} ended with {before.status}, the same command fails")
        if job.left(folder) != self._undisturbed.left(job):
            raise ended.failure("its files are not those of an undisturbed run")
        left = [p.name for p in (folder / "tmp").iterdir() if p.name.startswith("tritongemm")]
        left += [p.name for p in folder.iterdir() if p.name.startswith(".")]
        if left:
            raise ended.failure(f"left behind: {left}")


class Kills(CommandCampaign):
    """A command is sent a signal at a random moment, then run again."""

    name = "kills"

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        """Signal it once or twice, see that nothing of it lives on, and run it to its end."""
        job, folder = rng.choice(JOBS), self._undisturbed.new(folder)
        cold = {"TRITONGEMM_CACHE": str(folder / "cold")} if rng.random() < 0.3 else {}
        for _ in range(rng.randint(1, 2)):
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
            command = self._start(job, folder, cold)
            ended = command.signalled(number, rng.uniform(0.1, 5.0), _AFTER_KILL_SECONDS + 10)
            if number == signal.SIGKILL and ended.status == -signal.SIGKILL:
                self._nothing_lives_on(folder, ended)
            elif ended.status != -number or ended.out or ended.err:  # else it came before there was any handler
                ended.checked()
        self._finish(job, folder, ended)
        return Outcome.RECOVERED

    @staticmethod
    def _nothing_lives_on(folder: Path, ended: Ended) -> None:
        deadline = time.monotonic() + _AFTER_KILL_SECONDS
        while (alive := processes_with(f"{_MARKER}={folder}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in alive:
            os.kill(process, signal.SIGKILL)
        if alive:
            raise ended.failure(f"{len(alive)} processes live on after a kill")


class KilledChildren(CommandCampaign):
    """One of a command's own processes is killed, as the system does where memory is short."""

    name = "killed children"

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        job, folder = JOBS[0], self._undisturbed.new(folder)
        command = self._start(job, folder, {"TRITONGEMM_CACHE": str(folder / "cold")})
        time.sleep(rng.uniform(0.5, 5.0))
        children = processes_with(f"{_MARKER}={folder}")
        parent = command.process_id
        if victims := [child for child in children if child != parent]:
            os.kill(rng.choice(victims), signal.SIGKILL)
        ended = command.end().checked()
        if ended.status == 2:
            raise ended.failure("a killed child ends the run")
        self._finish(job, folder, ended)
        return Outcome.RECOVERED


class FullDisks(CommandCampaign):
    """No file that a command writes may pass a size, as on a disk that fills; then there is room."""

    name = "full disks"

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        job, folder = rng.choice(JOBS), self._undisturbed.new(folder)
        cold = {"TRITONGEMM_CACHE": str(folder / "cold")} if rng.random() < 0.5 else {}
        ended = self._start(job, folder, cold, int(2 ** rng.uniform(4, 18))).end().checked()
        self._finish(job, folder, ended)
        return Outcome.RECOVERED if ended.status else Outcome.HARMLESS


class HostileResults(CommandCampaign):
    """Results hold hostile values or are damaged, and are checked, timed, exported and tuned on."""

    name = "hostile results"

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        folder = self._undisturbed.new(folder)
        path = folder / "tuned.yaml"
        if rng.random() < 0.4:
            path.write_bytes(damaged(path.read_bytes(), rng))
        else:
            rows: list[dict[str, Any]] = yaml.safe_load(path.read_text())
            for _ in range(rng.randint(1, 3)):
                row = rng.choice(rows)
                row[rng.choice([*row, "options", "batch"])] = hostile.value(rng)
            text = "# Tuned by tritongemm, schema 2: hostile\n" + "".join(f"- {json.dumps(row)}\n" for row in rows)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        options = rng.choice(
            [
                ("tune", "--gemm_size_file", "tuned.yaml", "--compare_wo_tuning", *_TARGET),
                ("tune", "--gemm_size_file", "tuned.yaml", "--benchmark", *_TARGET),
                ("export", "tuned.yaml", "-o", "library", *_TARGET),
                ("tune", "--gemm_size_file", "sizes.yaml", "-o", "tuned.yaml", "--budget", "2", *_TARGET),
            ]
        )
        ended = self._start(Job(options[0], options[1:]), folder).end().checked()
        return Outcome.REFUSED if ended.status else Outcome.HARMLESS


class HostileCommandLines(CommandCampaign):
    """Options have values that they should not have."""

    name = "hostile command lines"
    _VARIABLES = ("TRITONGEMM_CACHE", "TRITONGEMM_CONFIG", "TRITONGEMM_ASM_MANIFESTS", "HOME", "TMPDIR", "LC_ALL")
    _SIZE = ("-m", "16", "-n", "16", "-k", "16")
    _TUNE_OPTIONS = (
        "-m", "-n", "-k", "-dtype_a", "-dtype_b", "-dtype_c", "--bias_vector", "--family", "--gemm_size_file",
        "--target", "--gpu_ids", "--ngpus", "--num_threads", "--strategy", "--budget", "--finalists", "--libtype",
        "--algorithms", "--min_gain", "--profiler", "--iters", "--warmup", "--init_type", "--rotating_tensor",
        "--errRatio", "--timeout", "-o", "--profile_file",
    )  # fmt: skip
    _PLAN_OPTIONS = ("-m", "-k", "-dtype_a", "--family", "--target", "--config", "--backend", "--manifest", "--all",
                     "-o", "--timeout", "--num_threads")  # fmt: skip

    def attempt(self, rng: random.Random, folder: Path) -> Outcome:
        folder = self._undisturbed.new(folder)
        module, argv, options = rng.choice(
            [
                ("tune", [*self._SIZE, "--generate_only", "-o", "out.yaml", *_TARGET], self._TUNE_OPTIONS),
                ("tune", [*self._SIZE, "--budget", "1", "-o", "out.yaml", *_TARGET], self._TUNE_OPTIONS),
                ("launch-plan", [*self._SIZE, "-o", "plans", *_TARGET], self._PLAN_OPTIONS),
                ("export", ["tuned.yaml", "-o", "library", *_TARGET], ("-o", "--target")),
            ]
        )
        for _ in range(rng.randint(1, 3)):
            argv += [rng.choice(options), self._word(rng)]
        variables = {}
        if rng.random() < 0.2:
            variables[rng.choice(self._VARIABLES)] = self._word(rng)
        ended = self._start(Job(module, tuple(argv)), folder, variables).end().checked()
        (original,) = self._undisturbed.left(JOBS[0])
        untouched = (folder / "sizes.yaml").read_text(), (folder / "tuned.yaml").read_bytes()
        if untouched != (_SIZES, original):
            raise ended.failure("a file of the user was replaced")
        return Outcome.REFUSED if ended.status else Outcome.HARMLESS

    @staticmethod
    def _word(rng: random.Random) -> str:
        """A hostile text that a command line can hold."""
        places = ("sizes.yaml", "tuned.yaml", ".", "absent/", "tmp", "/dev/full", "/dev/zero", "sizes.yaml/x")
        text = rng.choice(places) if rng.random() < 0.2 else hostile.text(rng)
        return text.replace("\0", "").encode("utf-8", "surrogateescape" if "\ud800" not in text else "replace").decode()


_UNDISTURBED = Undisturbed()
WITH_PROCESSES: tuple[Campaign, ...] = tuple(
    campaign(_UNDISTURBED) for campaign in (Kills, KilledChildren, FullDisks, HostileResults, HostileCommandLines)
)
