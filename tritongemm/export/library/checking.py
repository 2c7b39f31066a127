"""Checks which tuned results still hold for this toolchain, these libraries and this device, and replaces others.

A kernel's result holds while the toolchain makes the very code object that was measured: what the cache has is
compared, and the rest compiled, on all cores. Another driver changes no code object. An algorithm's result, and one
that the baseline won, hold while their library's version is the recorded one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tritongemm.build import prepare
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.launch import HostLaunch
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.export.library import building, writing
from tritongemm.export.library.building import target_of
from tritongemm.export.library.entry import LibraryKernel, record_m
from tritongemm.export.library.storage import KernelLibrary, open_library
from tritongemm.export.library.writing import Contents
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend, LibraryBackend
from tritongemm.plugins.validity import check_config, check_order
from tritongemm.system import settings

HOLDS = "holds"
MOVED = "moved"  # the toolchain makes another code object now, or the library has another version
UNKNOWN = "unknown"  # nothing was recorded that could be compared
FAILS = "fails"  # it can't be compiled, or launched, any more
DAMAGED = "damaged"  # its code object in a library is damaged
FOREIGN = "foreign"  # it is for another GPU than this machine's
UNCHECKED = "unchecked"  # its library can be asked on its GPU alone
STALE = (MOVED, UNKNOWN, FAILS, DAMAGED)


@dataclass(frozen=True)
class Claim:
    """A tuned result that is to be checked."""

    record: Record  # the result
    kernel: LibraryKernel | None = None  # its code in a library; None for a row of a results file
    fault: str = ""  # what is wrong with that code; "" where nothing is

    @property
    def sha256(self) -> str:
        """The hash of the code object that the result is of; "" where none was recorded."""
        return self.kernel.sha256 if self.kernel is not None else self.record.code


@dataclass(frozen=True)
class Checked:
    """The outcome of checking a claim."""

    claim: Claim  # what was asked
    state: str  # one of the states above
    reason: str = ""  # why, in words

    @property
    def stale(self) -> bool:
        """Whether the result is known not to hold, or nothing shows that it does."""
        return self.state in STALE


def check(claims: Sequence[Claim], here: Machine, pool: BuildPool) -> list[Checked]:
    """Return whether tuned results hold, in their order."""
    found: list[Checked | None] = []
    waiting: dict[int, tuple[CompileJob, Target]] = {}
    for number, claim in enumerate(claims):
        begun = prepare.or_refusal(partial(_begin, claim, here, pool))
        if isinstance(begun, tuple):
            found.append(None)
            waiting[number] = begun
        else:
            found.append(Checked(claim, FAILS, begun.reason) if isinstance(begun, Support) else begun)
    by_digest = {artifact.digest: artifact for artifact in pool.stream(job for job, _ in waiting.values())}
    for number, (job, target) in waiting.items():
        found[number] = _compare(claims[number], by_digest[job.digest], target)
    return [one for one in found if one is not None]


def _begin(claim: Claim, here: Machine, pool: BuildPool) -> Checked | tuple[CompileJob, Target]:
    """Return the answer where nothing has to be compiled for it; else what has to be, and for which device."""
    record, kernel = claim.record, claim.kernel
    if claim.fault:
        return Checked(claim, DAMAGED, claim.fault)
    if record.predicted:
        return Checked(claim, UNKNOWN, "its time is a prediction (timer: model); tune it on the GPU")
    if foreign := _foreign(record, here):
        return Checked(claim, FOREIGN, foreign)
    if record.winner != record.config.backend:
        return _compare_versions(claim, record.winner)
    if isinstance(registry.get(Backend, record.winner), LibraryBackend):
        return _compare_versions(claim, record.winner)
    target = target_of(record, here)
    possible = check_config(record.config, record.problem, target, record.target) and check_order(record, target)
    job = prepare.compile_job(record.problem, record.config, target) if possible else possible
    if isinstance(job, Support):
        return Checked(claim, FAILS, job.reason)
    if kernel is not None and kernel.source == job.digest and pool.cache.get(job.digest) is None:
        return Checked(claim, HOLDS)  # the same text, options and compiler
    if not claim.sha256:
        return Checked(claim, UNKNOWN, "its code object was not recorded")
    return job, target


def _foreign(record: Record, here: Machine) -> str:
    """Return why a result is not of this machine's GPU; "" where it is, or there is no GPU."""
    if not here.devices:
        return ""
    if record.target != here.target.name:
        return f"for {record.target or 'no target named'}; this GPU is {here.target.name}"
    units = here.target.compute_units
    if record.compute_units in (0, units):
        return ""
    return f"for {record.compute_units} compute units; this GPU has {units}"


def _compare_versions(claim: Claim, name: str) -> Checked:
    """Return whether a library that won still has the version that was measured."""
    record = claim.record
    try:
        backend = registry.get(Backend, name)
    except (InputError, UnavailableError) as error:
        return Checked(claim, FAILS, str(error))
    if name != record.config.backend or not dict(record.config.options).get("version"):
        label, recorded, now = "torch", record.toolchain.get("torch", ""), settings.version("torch")
    elif not (available := backend.available()):
        return Checked(claim, UNCHECKED, available.reason)
    else:
        assert isinstance(backend, LibraryBackend)
        label, recorded, now = backend.label, str(record.config.option("version")), backend.version()
    if not recorded:
        return Checked(claim, UNKNOWN, f"the version of {label} was not recorded")
    return Checked(claim, HOLDS) if recorded == now else Checked(claim, MOVED, f"{label} {recorded} → {now}")


def _compare(claim: Claim, artifact: Artifact, target: Target) -> Checked:
    """Return whether what was compiled is what was measured."""
    if artifact.status != "ok":
        return Checked(claim, FAILS, f"{artifact.status}: {artifact.reason}")
    if artifact.sha256 != claim.sha256:
        return Checked(claim, MOVED, _why_moved(claim))
    if claim.kernel is None:
        return Checked(claim, HOLDS)
    record = claim.record
    backend = registry.get(KernelBackend, record.config.backend)
    try:
        launch = backend.launch(replace(artifact, config=record.config), record.problem, target)
    except TritonGemmError as error:
        return Checked(claim, FAILS, str(error))
    stored = claim.kernel.launches.at(record_m(record))
    if isinstance(launch, HostLaunch) or isinstance(stored, Support):
        return Checked(claim, MOVED, "it is launched otherwise now")
    same = replace(launch, path="", at=tuple(launch.offsets())) == replace(stored, at=tuple(stored.offsets()))
    return Checked(claim, HOLDS) if same else Checked(claim, MOVED, "the same code object is launched otherwise now")


def _why_moved(claim: Claim) -> str:
    """Return what differs between the toolchain that made a code object and this one, as text."""
    made = claim.kernel.toolchain if claim.kernel is not None else claim.record.toolchain
    before, now = made.get("triton"), settings.version("triton")
    if before in (None, now):
        return "the kernel's text, its options or a tool are others now"
    return f"triton {before} → {now}"


class HeldLibrary:
    """A library that no other process writes meanwhile."""

    def __init__(self, path: Path, here: Machine) -> None:
        self._path, self._here, self._held = path, here, ExitStack()
        with ExitStack() as stack:
            stack.enter_context(writing.held(path))
            self._contents = _contents(open_library(path))
            self._held = stack.pop_all()

    def has(self, record: Record) -> bool:
        """Return whether an entry is still what was read of it."""
        return any(entry.record == record for entry in self._contents.entries.values())

    def replace(self, before: Record, after: Record) -> Support:
        """Replace a result with another, compiled where the cache lacks it; or return why it can't be held."""
        built = building.build([after], self._here)
        for _, reason in built.left_out:
            return Support(reason)
        old = self._contents
        entries = {key: entry for key, entry in old.entries.items() if entry.record != before}
        new = Contents(entries | {entry.key: entry for entry in built.entries}, {**old.codes, **built.readers()})
        writing.add_beside(new, built.helpers, built.targets, new.codes)
        new.helpers, new.targets = {**old.helpers, **new.helpers}, {**new.targets, **old.targets}
        writing.write(self._path, new)
        self._contents = new
        return SUPPORTED

    def close(self) -> None:
        """Let others write the library."""
        self._held.close()


def _contents(library: KernelLibrary) -> Contents:
    """Return what a library holds, also the entries whose code is damaged; these have no code to be read."""
    return Contents(
        {entry.key: entry for entry in library.all_entries()},
        writing.readers(library, library.faults()),
        {helper.key: helper for helper in library.all_helpers()},
        dict(library.targets),
    )
