"""Builds entries of a library from tuned results, with their launches at every M; compiles what the cache lacks."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tritongemm.build import expert_kernels, few_expert_kernels, helpers, prepare, quantization_kernels
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.prepare import PreparedKernel
from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Buffer, HostLaunch, Launch, StridePlaces
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.export.library.code_object import MOST_OBJECT_BYTES, SUFFIXES
from tritongemm.export.library.entry import LibraryEntry, LibraryHelper, LibraryKernel, record_m
from tritongemm.export.library.launch_table import LaunchTable, Run, fixed_of, numbers_of, tabulate
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.machine import Machine
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend, LibraryBackend
from tritongemm.search_spaces import loader
from tritongemm.system import settings

_LOOKED_AT = 4  # blocks of M that show how numbers go on
_MOST_PIECES = 8  # which a table has where launches are regular


def widen(table: LaunchTable, launch_at: Callable[[int], Launch | Support], block: int, most: int) -> LaunchTable:
    """Return a table of more M, up to where launches are regular."""
    pieces = [table]
    while True:
        last = pieces[-1]
        pieces[-1] = last = replace(last, high=_reach(last, launch_at, block, most))
        if last.high == most or len(pieces) == _MOST_PIECES:
            return _joined(pieces)
        following = tabulate(launch_at, last.high + 1, min(most, last.high + _LOOKED_AT * block), block)
        if isinstance(following, Support) or fixed_of(following.launch) != fixed_of(table.launch):
            return _joined(pieces)
        pieces.append(following)


def _reach(table: LaunchTable, launch_at: Callable[[int], Launch | Support], block: int, most: int) -> int:
    """Return the largest M up to which a table's last runs hold."""
    wanted = fixed_of(table.launch)

    def differs(m: int) -> bool:
        launch = launch_at(m)
        if isinstance(launch, Support) or fixed_of(replace(launch, path="")) != wanted:
            return True
        numbers, found = _continued(table, m), numbers_of(launch)
        return any(numbers.get(name, 0) != found.get(name, 0) for name in numbers.keys() | found.keys())

    reached = table.high
    for m in _samples(table.high, block, most):
        if differs(m):
            return reached + bisect_left(range(reached + 1, m + 1), True, key=differs)
        reached = m
    return reached


def _samples(high: int, block: int, most: int) -> Iterator[int]:
    """Yield some M above one, ascending: those around the beginnings of blocks, ever farther apart."""
    near, step = high, block
    seen = {most}
    while near < most:
        first = (near // block + 1) * block
        seen |= {near + 1, first - 1, first, first + 1}
        near, step = near + step, step * 2
    yield from sorted(m for m in seen if high < m <= most)


def _continued(table: LaunchTable, m: int) -> dict[str, int]:
    """Return the numbers of a launch at an M above a table's, as its last runs go on."""
    constant = {name: number for name, number in numbers_of(table.launch).items() if name not in table.runs}
    return constant | {name: runs[-1].at(m) for name, runs in table.runs.items()}


def _joined(pieces: Sequence[LaunchTable]) -> LaunchTable:
    """Return one table of tables that follow each other."""
    first, last = pieces[0], pieces[-1]
    every = [{b.name: max(b.bytes, piece.most_bytes(b.name)) for b in piece.launch.buffers} for piece in pieces]
    names = dict.fromkeys(name for buffers in every for name in buffers)
    buffers = tuple(Buffer(name, max(one.get(name, 0) for one in every)) for name in names)
    launch = replace(first.launch, buffers=buffers)
    runs: dict[str, tuple[Run, ...]] = {}
    for name in sorted(set().union(*(numbers_of(piece.launch) for piece in pieces))):
        found = [run for piece in pieces for run in _runs_of(piece, name)]
        if len(found) > len(pieces) or len({(run.value, run.rise) for run in found}) > 1 or found[0].rise:
            runs[name] = tuple(found)
    return LaunchTable(first.low, last.high, launch, runs)


def _runs_of(table: LaunchTable, name: str) -> Sequence[Run]:
    """Return the runs of a number, also of one that does not change."""
    return table.runs.get(name) or (Run(table.low, numbers_of(table.launch).get(name, 0)),)


_FLOATS = ("bf16", "fp16", "fp32")
_ROWS = (1, 1024)  # few and many: binaries do not depend on M otherwise


@dataclass
class BuiltHelpers:
    """The outcome of building helper kernels."""

    helpers: list[tuple[LibraryHelper, bytes]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def build_helpers(records: Sequence[Record], target: Target, toolchain: Mapping[str, str]) -> BuiltHelpers:
    """Return the helper kernels that calls of some products need, compiled where the cache lacks them."""
    wanted = {helper.digest(target.name): (helper, given) for r in records for helper, given in _wanted(r, target)}
    built = BuiltHelpers()
    if not wanted:
        return built
    cache = ArtifactCache(settings.cache_folder())
    try:
        artifacts = helpers.compile_helpers([helper for helper, _ in wanted.values()], target, cache)
    except TritonGemmError as error:
        built.left_out += [(str(helper), str(error)) for helper, _ in wanted.values()]
        return built
    for (digest, (helper, given)), artifact in zip(wanted.items(), artifacts, strict=True):
        try:
            built.helpers.append(_helper_entry(artifact, helper, given, digest, target, toolchain))
        except (TritonGemmError, OSError) as error:
            built.left_out.append((f"{helper} for {target.name}", str(error)))
    return built


def _helper_entry(
    artifact: Artifact,
    helper: HelperKernel,
    given: HelperArguments,
    digest: str,
    target: Target,
    toolchain: Mapping[str, str],
) -> tuple[LibraryHelper, bytes]:
    launch = helpers.launch_helper(artifact, helper, given, target)
    code = launch.read_code()
    sha256, suffix = hashlib.sha256(code).hexdigest(), Path(launch.path).suffix[1:]
    found = LibraryHelper(
        sha256, suffix, len(code), helper.name, target.name, digest, toolchain, replace(launch, path="")
    )
    return found, code


def _wanted(record: Record, target: Target) -> Iterable[tuple[HelperKernel, HelperArguments]]:
    """Yield the kernels that quantise the A of a product, and those of a mixture of experts."""
    problem = record.problem
    types = tuple(dict.fromkeys(("bf16", problem.c.dtype))) if problem.c.dtype in _FLOATS else ("bf16",)
    if target.supports(problem.a.type) or not problem.a.type.is_fp8:  # `quantize` refuses others
        for dtype_x in types:
            for m in _ROWS:
                asked = quantization_kernels.quantization_of(problem, dtype_x, m)
                yield from quantization_kernels.choose_kernels(asked) if asked is not None else ()
    if problem.c.dtype in _FLOATS:
        yield from expert_kernels.kernels_for(problem, target)
        if record.config.block_m == 1:
            yield from few_expert_kernels.kernels_for(problem)


_MOST_ROWS = 1 << 16  # of calls whose M no result has


@dataclass
class Built:
    """The outcome of building tuned results."""

    entries: list[LibraryEntry] = field(default_factory=list)  # of the library
    codes: dict[str, bytes] = field(default_factory=dict)  # code objects by their hash
    # Results that no library can hold, with the reason.
    left_out: list[tuple[Record, str]] = field(default_factory=list)
    # Kernels beside the products that calls of these results want.
    helpers: list[LibraryHelper] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)  # facts of the results' architectures
    # Kernels, of products or beside them, that no library can hold, with the reason.
    compiled_late: list[tuple[str, str]] = field(default_factory=list)

    def readers(self) -> dict[str, Callable[[], bytes]]:
        """Return a function that returns the bytes of each code object, by its hash."""
        return {sha256: partial(bytes, code) for sha256, code in self.codes.items()}


def build(records: Sequence[Record], here: Machine) -> Built:
    """Return the entries of tuned results, of any targets."""
    built = Built()
    groups: dict[tuple[str, int, str, bool], list[Record]] = {}
    for record in records:
        possible = _can_be_held(record)
        if isinstance(possible, Support) and not possible:
            built.left_out.append((record, possible.reason))
        elif isinstance(possible, Support):
            device = record.target, record.compute_units, record.toolchain.get("device", "")
            groups.setdefault((*device, record.m_from > 0), []).append(record)
        else:
            built.entries.append(possible)
    for group in groups.values():
        try:
            target = target_of(group[0], here)
        except TritonGemmError as error:
            built.left_out += [(record, str(error)) for record in group]
            continue
        for once in _once_each(group):
            _build_group(once, target, toolchain(here), built)
    faults = [(entry, entry.readable()) for entry in built.entries]
    built.entries = [entry for entry, readable in faults if readable]
    built.left_out += [(entry.record, f"a library can't hold it: {fault}") for entry, fault in faults if not fault]
    _add_beside(built, toolchain(here))
    return built


def _add_beside(built: Built, versions: dict[str, str]) -> None:
    """Add what calls of the entries need beside their kernels: facts of each architecture, and helper kernels."""
    records: dict[str, list[Record]] = {}
    for entry in built.entries:
        records.setdefault(entry.record.target, []).append(entry.record)
        if _is_compiled_by_a_package(entry):
            name = entry.record.winner
            built.compiled_late.append((entry.name, f"{name}'s own package compiles its kernel where that is called"))
    for name, of_target in records.items():
        try:
            target = loader.load_target(name)
        except TritonGemmError as error:
            built.compiled_late.append((f"what its calls want beside the products for {name}", str(error)))
            continue
        built.targets[name] = target
        found = build_helpers(of_target, target, versions)
        built.helpers += [helper for helper, _ in found.helpers]
        built.codes |= {helper.sha256: code for helper, code in found.helpers}
        built.compiled_late += found.left_out


def _is_compiled_by_a_package(entry: LibraryEntry) -> bool:
    """Return whether an entry without code needs the compiler of another package where it is served."""
    record = entry.record
    if entry.kernel is not None or record.winner != record.config.backend:
        return False
    backend = registry.get(Backend, record.winner)
    return isinstance(backend, LibraryBackend) and backend.compiles


def _once_each(records: Iterable[Record]) -> list[list[Record]]:
    """Return the records in lists that have each problem once."""
    lists: list[list[Record]] = []
    for record in records:
        free = next((one for one in lists if all(r.problem != record.problem for r in one)), None)
        if free is None:
            lists.append(free := [])
        free.append(record)
    return lists


def target_of(record: Record, here: Machine) -> Target:
    """Return the facts of the device that a result is for: of this machine's own GPU where it is of that kind."""
    if here.devices and here.target.name == record.target and record.compute_units in (0, here.target.compute_units):
        return here.target
    known = loader.load_target(record.target, record.toolchain.get("device", ""))
    return replace(known, compute_units=record.compute_units) if record.compute_units else known


def toolchain(here: Machine) -> dict[str, str]:
    """Return the versions that compile here, and the driver's where there is one."""
    versions = {package: settings.version(package) for package in ("triton", "torch")}
    return versions | ({"driver": str(driver.open_driver(here.vendor).version())} if here.vendor else {})


def _can_be_held(record: Record) -> Support | LibraryEntry:
    """Return whether a result's kernel is to be compiled, why it can't be held, or its entry without one."""
    if record.predicted:
        return Support("its time is a prediction (timer: model); tune it on the GPU")
    if not record.target:
        return Support("it names no target")
    if record.winner != record.config.backend:
        return LibraryEntry(record)
    try:
        backend = registry.get(Backend, record.winner)
    except (InputError, UnavailableError) as error:
        return Support(str(error))
    return SUPPORTED if isinstance(backend, KernelBackend) else LibraryEntry(record)


def _build_group(records: Sequence[Record], target: Target, versions: dict[str, str], built: Built) -> None:
    """Build results of one device, each of another problem."""
    kernels = prepare.prepare_kernels(records, target, ArtifactCache(settings.cache_folder()))
    for record in records:
        prepared = kernels[record.problem]
        made = prepared if isinstance(prepared, Support) else _entry(prepared, versions)
        if isinstance(made, Support):
            built.left_out.append((record, f"{record.config.name}: {made}"))
            continue
        entry, code = made
        built.entries.append(entry)
        built.codes[hashlib.sha256(code).hexdigest()] = code


def _entry(prepared: PreparedKernel, versions: dict[str, str]) -> tuple[LibraryEntry, bytes] | Support:
    """Return the entry of a compiled kernel with its code, or why no manifest can describe it."""
    launch, target = prepared.launch, prepared.target
    if isinstance(launch, HostLaunch):
        return Support("its own host code launches it, and a library holds no code of a host")
    suffix = Path(launch.path).suffix[1:]
    code = prepare.or_refusal(launch.read_code)
    if isinstance(code, Support):
        return code
    if suffix not in SUFFIXES or len(code) > MOST_OBJECT_BYTES:
        return Support(f"{Path(launch.path).name} of {len(code)} bytes is no code object of a GPU")
    table = launch_table(prepared)
    if isinstance(table, Support):
        return table
    kernel = LibraryKernel(
        sha256=hashlib.sha256(code).hexdigest(),
        suffix=suffix,
        size=len(code),
        source=prepared.artifact.digest,
        toolchain=versions,
        tf32=prepared.record.problem.a.dtype == "fp32" and target.has("tf32"),
        launches=table,
        strides=_stride_places(prepared),
    )
    # The split and the order of a grid follow from the number of compute units.
    return LibraryEntry(replace(prepared.record, compute_units=target.compute_units), kernel), code


def _stride_places(prepared: PreparedKernel) -> StridePlaces | None:
    """Return the places of the operands' strides in a batched kernel's launches."""
    record = prepared.record
    if record.problem.kind != "batched":
        return None
    found = registry.get(KernelBackend, record.winner).stride_places(record.config, record.problem)
    return None if isinstance(found, Support) else found


def launch_table(prepared: PreparedKernel) -> LaunchTable | Support:
    """Return the launches of a kernel at every M that its record serves, and others that calls may ask for, or why
    no manifest can describe them.
    """
    record, block = prepared.record, max(1, prepared.record.config.block_m)
    high = record_m(record)
    low = record.m_from or high
    if not (carries := prepared.serves(low)):
        return carries
    widens = any(serves_other_m(record.problem.at(m), record.target) for m in (1, high))
    if widens and prepared.serves(1):
        low = 1

    def launch_at(m: int) -> Launch | Support:
        launch = prepared.launch if m == high else prepared.launch_at(m)
        return Support("its own host code launches it") if isinstance(launch, HostLaunch) else launch

    table = tabulate(launch_at, low, high, block)
    if isinstance(table, Support) or not widens or not prepared.serves(_MOST_ROWS):
        return table
    return widen(table, launch_at, block, _MOST_ROWS)
