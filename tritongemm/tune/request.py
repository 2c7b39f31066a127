"""The class `TuneRequest`, what a command line, a Python program or a campaign asks a run for, and effort levels."""

from dataclasses import dataclass, field
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.measure.choose import MARGIN
from tritongemm.tune.options import TuningOptions
from tritongemm.workloads.model_sizes import DEFAULT_TOKENS
from tritongemm.workloads.sizes import Size


@dataclass(frozen=True)
class ModelSource:
    """A model whose linear layers are tuned.

    Attributes:
        place: its folder, or its name at Hugging Face.
        tp: GPUs that share each layer.
        tokens: values of M.
        every_bias: tune each layer with and without a bias.
    """

    place: Path
    tp: int = 1
    tokens: tuple[int, ...] = DEFAULT_TOKENS
    every_bias: bool = False


@dataclass(frozen=True)
class SizeSource:
    """The source of sizes: values, a file, one size, a range of M, a server's table or a model.

    Attributes:
        given: sizes as values.
        path: a file of sizes, or of a workload with call counts.
        is_workload: tune a table over M for each N and K of the file.
        m, n, k: one size; without `m` the N and K of `m_range` or of a server's table.
        m_range: the least and the largest M of tables.
        join: tune tables of layers with one input joined to one product.
        model: whose layers are tuned.
        defaults: what holds where a size does not say it; what depends on the target is filled in later.
    """

    given: tuple[Size, ...] = field(default=(), hash=False)
    path: Path | None = None
    is_workload: bool = False
    m: int | None = None
    n: int | None = None
    k: int | None = None
    m_range: tuple[int, int] | None = None
    join: bool = True
    model: ModelSource | None = None
    defaults: Defaults = field(default_factory=Defaults)

    @property
    def may_lack(self) -> bool:
        """Whether sizes that the target can't compute are left out; of other sources they are refused."""
        return self.is_workload or self.model is not None


@dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
        target: architecture; None for this machine's GPU.
        gpu_ids: ordinals of GPUs, with commas between; None for the first `ngpus`.
        ngpus: number of GPUs; 0 for one of this machine, or for all of a cluster.
        ray: address of a Ray cluster; None for this machine alone.
        compilers: compiler processes; 0 for one per core.
    """

    target: str | None = None
    gpu_ids: str | None = None
    ngpus: int = 0
    ray: str | None = None
    compilers: int = 0


@dataclass(frozen=True)
class SearchScope:
    """What is tried, and what races.

    Attributes:
        effort: a level of `EFFORTS`, which decides what `strategy` and `budget` leave open.
        strategy: plug-in of strategies/; None for the effort's.
        budget: most configs tried for each size, and seconds of the run after which nothing new is tried, each 0 for no
            limit; None for the effort's.
        population: configs of a generation, of a strategy that has generations; 0 for its own number.
        finalists: candidates of each size that are verified and raced.
        max_split: most programs that share K of a tile; 0 for the search space's values.
        libtype: backends that race: ``all``, names with commas between, or None for those that compile quickly.
        algorithms: most algorithms screened of a vendor's library for each size; 0 for all.
        margin: relative gain below which the library is kept.
        server: name of the server whose tables are tuned; None for none.
        top_k: experts per token, of a server's MoE kernel.
    """

    effort: str = "normal"
    strategy: str | None = None
    budget: tuple[int, float] | None = None
    population: int = 0
    finalists: int = TuningOptions.finalists
    max_split: int = 0
    libtype: str | None = None
    algorithms: int = TuningOptions.algorithms
    margin: float = MARGIN
    server: str | None = None
    top_k: int | None = None

    @property
    def seconds(self) -> float:
        """The seconds of the run after which nothing new is tried; 0 for no limit."""
        return self.budget[1] if self.budget else 0.0


@dataclass(frozen=True)
class Outputs:
    """The files of results.

    Attributes:
        path: results file, or a file of another tool's format beside which results go; None for one named after the
            target in the folder output/.
        to: format of `path`; "" for what its contents or name say.
        candidates: a CSV of every candidate; None for none.
        resume: go on from what is there; otherwise measure again.
        keep: keep the modules with the configs that were tried.
    """

    path: Path | None = None
    to: str = ""
    candidates: Path | None = None
    resume: bool = True
    keep: bool = False


@dataclass(frozen=True)
class TuneRequest:
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
    timeout_s: float = 60.0
    stop: str = ""
    invariant: bool | str = False


@dataclass(frozen=True)
class Effort:
    """How much is tried of each size.

    Attributes:
        budget: most configs tried where candidates are timed; 0 for as many as the strategy likes.
        untimed: most configs compiled, the best predicted, where nothing is timed; 0 for all that pruning keeps.
        summary: for help texts.
        strategy: plug-in of strategies/; None for guided search on a GPU, and all of the best predicted without one.
    """

    budget: int
    untimed: int
    summary: str
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
