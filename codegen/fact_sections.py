"""The sections of a template's header: what the search must know of its kernels, and in which order they add up."""

from dataclasses import dataclass

from tritongemm.core.config import Config

RUNS = "runs"  # an option that is searched only where a run asks for the order of splits
PAIRWISE = "pairwise"  # an option that adds up those runs two by two, searched only where a run asks for that
GRIDS = ("tile", "unit", "unit_unless_split")  # of `SearchFacts.grid`


@dataclass(frozen=True)
class SearchFacts:
    """What the search must know of a template beyond its configs; a header names these facts under ``search``.

    Attributes:
        rules: groups of pruning rules that decide on its configs, beside those that decide on all.
        matrix: whether matrix instructions make its products; otherwise each thread makes its own, in registers.
        grid: what its programs are: one for each ``tile`` and split; one for each compute ``unit``, whatever the size;
            ``unit_unless_split``: one for each compute unit, or for each tile and split where there are several.
        cuts_k: whether tiles that do not fill a round of such programs are cut along K: ``always``, ``never``, or the
            name of the option that says so.
        slow_start: whether its programs take long until their first product, so that fetching ahead always pays.
        asked: whether it is searched only where a run names it, as a kernel of another program's.
    """

    rules: frozenset[str] = frozenset()
    matrix: bool = True
    grid: str = "tile"
    cuts_k: str = "always"
    slow_start: bool = False
    asked: bool = False

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
    """The order in which a template's kernels add up products; a header names these facts under ``order``.

    Attributes:
        run: expression of the elements of K that one program adds up from zero, before these sums are added from the
            first to the last; 0 where K is cut otherwise, or an element's place in its tile decides.
        sums: what distinguishes the way in which these sums are added from that of other templates; "" for nothing.
        by_columns: expression that says whether the columns of a tile decide in which order.
        unit: the instructions that multiply, where the template always has the same; "" where its tile decides.
        long_block: elements of K in a block of a sum that is too long for matrix units; 0 for one of BLOCK_K.
        most_runs: largest value of the option `RUNS`, by which one program adds up K in the order of as many splits.
    """

    run: str = "K"
    sums: str = ""
    by_columns: str = "0"
    unit: str = ""
    long_block: int = 0
    most_runs: int = 1
