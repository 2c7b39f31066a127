"""The sections of a template's header: what the search must know of its kernels, and in which order they add up."""

from dataclasses import dataclass

from tritongemm.core.config import Config

RUNS = "runs"  # an option that is searched only where a run asks for the order of splits
PAIRWISE = "pairwise"  # an option that adds up those runs two by two, searched only where a run asks for that
GRIDS = ("tile", "unit", "unit_unless_split")  # of `SearchFacts.grid`


@dataclass(frozen=True)
class SearchFacts:
    """What the search must know of a template beyond its configs; a header names these facts under ``search``."""

    # Groups of pruning rules that decide on its configs, beside those that decide on all.
    rules: frozenset[str] = frozenset()
    # Whether matrix instructions make its products; otherwise each thread makes its own, in registers.
    matrix: bool = True
    # What its programs are: one for each `tile` and split; one for each compute `unit`, whatever the size;
    # `unit_unless_split`: one for each compute unit, or for each tile and split where there are several.
    grid: str = "tile"
    # Whether tiles that do not fill a round of such programs are cut along K: `always`, `never`, or the name of the
    # option that says so.
    cuts_k: str = "always"
    # Whether its programs take long until their first product, so that fetching ahead always pays.
    slow_start: bool = False
    asked: bool = False  # whether it is searched only where a run names it, as a kernel of another program's

    def cuts(self, config: Config) -> bool:
        """Return whether tiles that do not fill a round of persistent programs are cut along K."""
        if self.cuts_k in ("always", "never"):
            return self.cuts_k == "always"
        return bool(config.option(self.cuts_k))

    def one_a_unit(self, config: Config) -> bool:
        """Return whether a launch has a program for each compute unit, whatever the size."""
        return self.grid == "unit" or (self.grid == "unit_unless_split" and config.split_k == 1)


@dataclass(frozen=True)
class OrderFacts:
    """The order in which a template's kernels add up products; a header names these facts under ``order``."""

    # Expression of the elements of K that one program adds up from zero, before these sums are added from the first to
    # the last; 0 where K is cut otherwise, or an element's place in its tile decides.
    run: str = "K"
    by_columns: str = "0"  # expression that says whether a tile's columns decide in which order these sums are added
    unit: str = ""  # the instructions that multiply, where the template always has the same; "" where its tile decides
    long_block: int = 0  # elements of K in a block of a sum that is too long for matrix units; 0 for one of BLOCK_K
    # Largest value of the option `RUNS`, by which one program adds up K in the order of as many splits.
    most_runs: int = 1
