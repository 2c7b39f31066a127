"""The class `TuneRequest`, what a command line, a Python program or a campaign asks a run for, and effort levels."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.values import FINITE, MOST, POSITIVE, FieldKind, Natural, integer, kinds_of, require
from tritongemm.measure.choose import MARGIN
from tritongemm.tune.options import TuningOptions
from tritongemm.workloads.model_sizes import DEFAULT_TOKENS
from tritongemm.workloads.sizes import Size

_RANGE = FieldKind(
    f"the least and the largest M, from 1 to {MOST}", lambda v: v is None or (_is_pair(v) and 1 <= v[0] <= v[1] <= MOST)
)
_BUDGET = FieldKind(
    "a number of configs and one of seconds", lambda v: v is None or (_is_pair(v) and all(map(FINITE.holds, v)))
)
_STAGE = FieldKind("empty, generate or compile", lambda v: v in ("", "generate", "compile"))
_RUNS = FieldKind("1, 2, 4 or 8", lambda v: v in (1, 2, 4, 8))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


class _Checked:
    """A part of a request, whose fields hold what their types say."""

    def __post_init__(self) -> None:
        """Refuse other values."""
        require(vars(self), kinds_of(type(self)))


@dataclass(frozen=True)
class ModelSource:
    """A model whose linear layers are tuned."""

    place: Path  # its folder, or its name at Hugging Face
    tp: int = 1  # GPUs that share each layer
    tokens: tuple[int, ...] = DEFAULT_TOKENS  # values of M
    every_bias: bool = False  # tune each layer with and without a bias


@dataclass(frozen=True)
class SizeSource(_Checked):
    """The source of sizes: values, a file, one size, a range of M, a server's table or a model."""

    given: tuple[Size, ...] = field(default=(), hash=False)  # sizes as values
    path: Path | None = None  # a file of sizes, or of a workload with call counts
    is_workload: bool = False  # tune a table over M for each N and K of the file
    # m, n, k: one size; without `m` the N and K of `m_range` or of a server's table
    m: int | None = None
    n: int | None = None
    k: int | None = None
    m_range: Annotated[tuple[int, int] | None, _RANGE] = None  # the least and the largest M of tables
    join: bool = True  # tune tables of layers with one input joined to one product
    model: ModelSource | None = None  # whose layers are tuned
    # What holds where a size does not say it; what depends on the target is filled in later.
    defaults: Defaults = field(default_factory=Defaults)

    @property
    def may_lack(self) -> bool:
        """Whether sizes that the target can't compute are left out; of other sources they are refused."""
        return self.is_workload or self.model is not None


@dataclass(frozen=True)
class Devices(_Checked):
    """The devices of a run."""

    target: str | None = None  # architecture; None for this machine's GPU
    gpu_ids: str | None = None  # ordinals of GPUs, with commas between; None for the first `ngpus`
    ngpus: Natural = 0  # number of GPUs; 0 for one of this machine, or for all of a cluster
    ray: str | None = None  # address of a Ray cluster; None for this machine alone
    compilers: Natural = 0  # compiler processes; 0 for one per core


@dataclass(frozen=True)
class SearchScope(_Checked):
    """What is tried, and what races."""

    effort: str = "normal"  # a level of `EFFORTS`, which decides what `strategy` and `budget` leave open
    strategy: str | None = None  # plug-in of strategies/; None for the effort's
    # Most configs tried for each size, and seconds of the run after which nothing new is tried, each 0 for no limit;
    # None for the effort's.
    budget: Annotated[tuple[int, float] | None, _BUDGET] = None
    population: Natural = 0  # configs of a generation, of a strategy that has generations; 0 for its own number
    # Candidates of each size that are verified and raced.
    finalists: Annotated[int, integer(1, MOST)] = TuningOptions.finalists
    max_split: Natural = 0  # most programs that share K of a tile; 0 for the search space's values
    # Backends that race: `all`, names with commas between, or None for those that compile quickly.
    libtype: str | None = None
    # Most algorithms screened of a vendor's library for each size; 0 for all.
    algorithms: Natural = TuningOptions.algorithms
    margin: Annotated[float, FINITE] = MARGIN  # relative gain below which the library is kept
    server: str | None = None  # name of the server whose tables are tuned; None for none
    top_k: int | None = None  # experts per token, of a server's MoE kernel

    @property
    def seconds(self) -> float:
        """The seconds of the run after which nothing new is tried; 0 for no limit."""
        return self.budget[1] if self.budget else 0.0


@dataclass(frozen=True)
class Outputs:
    """The files of results."""

    # Results file, or a file of another tool's format beside which results go; None for one named after the target in
    # the folder output/.
    path: Path | None = None
    to: str = ""  # format of `path`; "" for what its contents or name say
    candidates: Path | None = None  # a CSV of every candidate; None for none
    resume: bool = True  # go on from what is there; otherwise measure again
    keep: bool = False  # keep the modules with the configs that were tried


@dataclass(frozen=True)
class TuneRequest(_Checked):
    """Everything that a tuning run needs to know.

    Attributes:
        sizes: what to tune.
        devices: where.
        search: what is tried, and what races.
        outputs: where results go.
        protocol: how times are taken; its timer is chosen by `profiler`.
        profiler: name of a timer, ``auto``, or None for the default.
        timeout_s: limit of one compile, or of one candidate on the GPU, in seconds.
        stop: "" to tune, or the stage after which to stop: ``generate`` or ``compile``.
        invariant: whether rows get the same bits at every M: all kernels of a product add up in one order, that of an
            unsplit K; ``library``: algorithms of the library that agree race too.
        invariant_runs: equal runs of K, 1, 2, 4 or 8, whose sums invariant rows add pairwise; 1 for the fastest order.

    Examples:
        >>> from tritongemm.tune.request import SearchScope, SizeSource
        >>> request = tritongemm.TuneRequest(SizeSource(given=((16, 4096, 4096),)), search=SearchScope(budget=(0, 90)))
        >>> request.search.seconds
        90
    """

    sizes: SizeSource = field(default_factory=SizeSource)
    devices: Devices = field(default_factory=Devices)
    search: SearchScope = field(default_factory=SearchScope)
    outputs: Outputs = field(default_factory=Outputs)
    protocol: MeasureProtocol = field(default_factory=MeasureProtocol)
    profiler: str | None = None
    timeout_s: Annotated[float, POSITIVE] = 60.0
    stop: Annotated[str, _STAGE] = ""
    invariant: bool | str = False
    invariant_runs: Annotated[int, _RUNS] = 1


@dataclass(frozen=True)
class Effort:
    """How much is tried of each size."""

    budget: int  # most configs tried where candidates are timed; 0 for as many as the strategy likes
    untimed: int  # most configs compiled, the best predicted, where nothing is timed; 0 for all that pruning keeps
    summary: str  # for help texts
    # Plug-in of strategies/; None for guided search on a GPU, and all of the best predicted without one.
    strategy: str | None = None


EFFORTS = {
    "quick": Effort(32, 16, "at most 32 configs per size, half the time of normal; 16 if nothing is timed"),
    "normal": Effort(0, 64, "guided search with its own budget, 48 to 128 configs per size; 64 if nothing is timed"),
    "full": Effort(0, 0, "all configs that pruning keeps, thousands of a large size", "exhaustive"),
}


def effort(name: str) -> Effort:
    """Return the level of a name."""
    if name not in EFFORTS:
        raise InputError(f"there is no effort {name!r}; there are: {', '.join(EFFORTS)}")
    return EFFORTS[name]
