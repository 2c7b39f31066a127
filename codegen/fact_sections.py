"""A template's header and its sections: what the search must know of its kernels, and in which order they add up."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError

RUNS = "runs"  # an option that is searched only where a run asks for the order of splits
PAIRWISE = "pairwise"  # an option that adds up those runs two by two, searched only where a run asks for that
GRIDS = ("tile", "unit", "unit_unless_split")  # of `SearchFacts.grid`
# Of `SearchFacts.rules`: the groups of the rules in tritongemm/search/pruning/rules/.
RULE_GROUPS = {
    "deep_pipeline", "fragments", "grouped", "matrix", "needs", "pointers", "stream_k", "swapped", "vector",
    "warp_roles",
}  # fmt: skip
KINDS = ("one", "batched", "grouped")  # of `Problem.kind`
_LISTS, _MAPS = ("grid", "kinds", "constexprs", "launch_options"), ("defaults", "search", "order", "names")
_FACTS = re.compile(r"\A\{#---\n(.*?)\n---#\}", re.DOTALL)


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


def read_header(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the facts of a template's header, with those that it inherits.

    Raises:
        InputError: there is none, it is no map in YAML, or it names what is not there; says what.
    """
    file = f"templates/kernels/{path.name}"
    match = _FACTS.match(path.read_text(encoding="utf-8"))
    if not match:
        raise InputError(f"{file} must begin with a {{#--- … ---#}} block of facts")
    facts = _read_map(file, match[1])
    if unknown := sorted(set(facts) - set(known)):
        complaint = f"{', '.join(unknown)}, which nothing reads; it can have {', '.join(sorted(known))}"
        raise InputError(f"{file}: the header has {complaint}")
    inherited = list[Path]()
    while base := facts.pop("inherit", ""):
        parent = path.with_name(f"{base}.yaml")
        if parent in inherited or not parent.is_file():
            raise InputError(f"{file}: inherit must name another file beside it, without .yaml; not {base}")
        inherited.append(parent)
        shared = _read_map(f"{file} inherits {parent.name}", parent.read_text(encoding="utf-8"))
        facts = shared | {k: shared[k] | v if isinstance(shared.get(k), dict) else v for k, v in facts.items()}
    for keys, kind in ((_LISTS, list), (_MAPS, dict)):
        if wrong := [key for key in keys if not isinstance(facts.get(key, kind()), kind)]:
            raise InputError(f"{file}: {', '.join(wrong)} must be a {'list' if kind is list else 'map'}")
    constants = facts.get("constexprs", ())
    for key, there in (("kinds", KINDS), ("defaults", constants), ("launch_options", constants)):
        if unknown := [str(name) for name in facts.get(key, ()) if name not in there]:
            raise InputError(
                f"{file}: {key} has {', '.join(unknown)}; there are: {', '.join(there) or 'no constexprs'}"
            )
    return facts


def _read_map(what: str, text: str) -> dict[str, Any]:
    try:
        facts = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{what}: the header is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(facts, dict):
        raise InputError(f"{what}: the header must be a map of facts")
    return facts
