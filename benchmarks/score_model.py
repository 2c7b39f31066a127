"""How often a tuned tile is among the model's first: ``python benchmarks/score_model.py FILE … --target gfx942``.

FILE is a list of maps as tune_gemm writes them (M, N, K, rowMajorA, BLOCK_SIZE_M …, with SPLIT_K, or NUM_SMS for
stream-K), or a table of tiles as vLLM and SGLang ship them. The model ranks the configs our own space and rules leave;
a tile ranks as its best config does, and a tuned tile that was pruned counts as a miss. A tuned tile is a noisy label:
other tiles are often within a per cent of it.

It ranks for what the label is the best of. tune_gemm launches one kernel on the same operands time after time, so they
stay in the caches that hold them (`--cold` for memory, as our own timers have it); and it tries split-K only where M or
N is below 64 and K is a multiple of the parts (`--any_split` for every factor our rules keep). `--named` ranks nothing
but the tiles that the files name, whatever our rules say: for files of whose tuner's space only the winners are known.

Stream-K rows are ranked as launches of NUM_SMS programs, one on a compute unit, which go from one full tile to the
next: AMD's kernels cut no tile where there are no more tiles than programs, and what is left over otherwise.
`--cut_k` ranks them as kernels that always cut what is left over, as our own do
(docs/measurements/cost-model-correction.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _common  # noqa: F401 (it puts the checkout on Python's path)
import yaml

from tritongemm.core.config import AXES, Config
from tritongemm.core.dtypes import dtype
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune
from tritongemm.search.pruning.rules import RULES, Rule
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

TOPS = (1, 5, 10, 20)
# What a kernel can't do or can't gain by, whatever space its tuner had.
NAMED_RULES = tuple(r for r in RULES if r.name in ("group_m", "lds", "accumulator", "nonkdim_size", "few_instructions"))
TABLES = ("vllm_dense_json", "sglang_dense_json")
Tile = tuple[int, int, int]


def split_needed(config: Config, problem: Problem, target: Target) -> str | None:
    """Split-K is for a small M or N and a long K, as in ROCm Triton's tune_gemm."""
    needed = (problem.m < 64 or problem.n < 64) and problem.k > 1024
    return f"split-K {config.split_k} not needed" if config.split_k != 1 and not needed else None


def split_divides(config: Config, problem: Problem, target: Target) -> str | None:
    """Splits of complete blocks must divide K, as in ROCm Triton's tune_gemm."""
    step = config.split_k * config.block_k
    return f"K {problem.k} % {step} != 0" if config.split_k != 1 and problem.k % step else None


SPLIT_RULES = (Rule("split_needed", split_needed), Rule("split_divides", split_divides))


@dataclass(frozen=True)
class Row:
    """One tuned size: the problem, the tile that won, and the programs of its grid (0: one per tile)."""

    problem: Problem
    tile: Tile
    num_sms: int


@dataclass(frozen=True)
class Score:
    """Where the model put a tuned tile: rank from 1, or 0 when the rules dropped it; best: the model's first tiles."""

    row: Row
    rank: int
    tiles: int
    best: tuple[Tile, ...]


def read(path: Path, fp8: str = "fn") -> list[Row]:
    """Rows of a tuned file; sizes without a tile are passed over."""
    text = path.read_text(encoding="utf-8")
    for table in (registry.get(Format, name) for name in TABLES):
        if table.recognises(path, text):
            return [Row(r.problem, r.config.tile, 0) for r in table.read(path, text, Defaults()) if r.config]
    return [row for entry in yaml.safe_load(text) or [] if (row := _row(entry, fp8))]


def _row(entry: dict[str, Any], fp8: str) -> Row | None:
    if "BLOCK_SIZE_M" not in entry:
        return None
    names = [str(entry.get(f"dtype_{x}", "fp16")) for x in "abc"]
    problem = Problem(
        *(int(entry[x]) for x in "MNK"),
        *matrices(
            *(dtype(name, fp8).name for name in names),
            layout="NT"[entry.get("rowMajorA", "T") == "T"] + "NT"[entry.get("rowMajorB", "N") == "T"],
        ),
    )
    m, n, k = (int(entry[f"BLOCK_SIZE_{x}"]) for x in "MNK")
    return Row(problem, (m, n, k), int(entry.get("NUM_SMS", 0)))


@dataclass(frozen=True)
class Conditions:
    """What the labels are the best of.

    Attributes:
        tried: only split-K factors tune_gemm would try.
        warm: operands come from the caches that hold them, as where tune_gemm times.
        cut_k: programs of stream-K rows share tiles that do not fill a round.
        named: the only tiles that are ranked; empty for those of the pruned space.
    """

    tried: bool = True
    warm: bool = True
    cut_k: bool = False
    named: frozenset[Tile] = frozenset()


USUAL = Conditions()


def order(row: Row, target: Target, given: Conditions = USUAL) -> list[Tile]:
    """Distinct tiles, the model's favourite first."""
    kept = _kept(row.problem, target, given)
    if row.num_sms:
        template, sms = "stream_k" if given.cut_k else "persistent", (("num_sms", row.num_sms),)
        # Stream-K deals out K by itself, so split-K only repeats a config.
        kept = [replace(c, template=template, options=c.options + sms) for c in kept if c.split_k == 1]
    return list(dict.fromkeys(p.config.tile for p in rank(kept, row.problem, target, warm=given.warm)))


def _kept(problem: Problem, target: Target, given: Conditions) -> Sequence[Config]:
    """The configs that are ranked, one for each tile, group of rows, split and number of warps."""
    entire = space(problem, target, templates=("tile",))
    # Options do not distinguish tiles; the first value of each is allowed for every tile.
    lean = [
        replace(a, values=a.values[: len(AXES)] + tuple((n, v[:1]) for n, v in a.values[len(AXES) :]))
        for a in entire.axes
    ]
    if given.named:
        wanted = {"split_k": {1}} | {x: {t[i] for t in given.named} for i, x in enumerate(AXES[:3])}
        few = [
            replace(a, values=tuple((x, tuple(v for v in vs if v in wanted.get(x, vs))) for x, vs in a.values))
            for a in lean
        ]
        listed = [c for c in replace(entire, axes=tuple(few)) if c.tile in given.named]
        return prune(listed, problem, target, NAMED_RULES).kept
    kept = prune(replace(entire, axes=tuple(lean)), problem, target).kept
    return prune(kept, problem, target, SPLIT_RULES).kept if given.tried else kept


def score(rows: Iterable[Row], target: Target, given: Conditions = USUAL) -> list[Score]:
    """Where the model puts each row's tile."""
    seen: dict[tuple[Problem, int], list[Tile]] = {}
    scores = []
    for row in rows:
        key = row.problem, row.num_sms
        if key not in seen:
            seen[key] = order(row, target, given)
        tiles = seen[key]
        place = tiles.index(row.tile) + 1 if row.tile in tiles else 0
        scores.append(Score(row, place, len(tiles), tuple(tiles[:3])))
    return scores


def agreement(scores: list[Score]) -> dict[int, float]:
    """Share of rows whose tuned tile is among the first k, by k."""
    return {k: sum(0 < s.rank <= k for s in scores) / max(1, len(scores)) for k in TOPS}


def by_size(scores: list[Score]) -> dict[str, list[Score]]:
    """All rows, then by the square root of M*N, where different things bound a GEMM."""
    parts: dict[str, list[Score]] = {"all": scores, "<512": [], "512-2048": [], ">=2048": []}
    for s in scores:
        size = (s.row.problem.m * s.row.problem.n) ** 0.5
        parts["<512" if size < 512 else "512-2048" if size < 2048 else ">=2048"].append(s)
    return {name: part for name, part in parts.items() if part}


def main(argv: list[str] | None = None) -> int:
    """Score the model against a tuned file and print it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--target", default="gfx942")
    parser.add_argument("--json", type=Path, help="write the figures and every row's rank here")
    parser.add_argument("--worst", type=int, nargs="?", const=10, default=0, help="list the worst sizes")
    parser.add_argument("--cold", action="store_true", help="all operands come from memory")
    parser.add_argument("--any_split", action="store_true", help="rank split-K factors that tune_gemm never tries, too")
    parser.add_argument("--cut_k", action="store_true", help="rank stream-K rows as kernels that cut K")
    parser.add_argument("--named", action="store_true", help="rank the tiles that the files name, and no others")
    args = parser.parse_args(argv)
    target = target_files.load_target(args.target)
    rows = [row for path in args.files for row in read(path, target.fp8)]
    named = frozenset(row.tile for row in rows) if args.named else frozenset()
    scores = score(rows, target, Conditions(not args.any_split, not args.cold, args.cut_k, named))
    print(f"{'sqrt(MN)':<10} {'rows':>5}" + "".join(f"{f'top-{k}':>8}" for k in TOPS))
    for name, part in by_size(scores).items():
        print(f"{name:<10} {len(part):>5}" + "".join(f"{100 * v:>7.1f}%" for v in agreement(part).values()))
    worst = sorted(scores, key=lambda s: s.rank or s.tiles + 1, reverse=True)[: args.worst]
    for s in worst:
        place = f"{s.rank} of {s.tiles}" if s.rank else f"pruned ({s.tiles} kept)"
        print(f"{s.row.problem.key}: tuned {s.row.tile} ranks {place}; model: {', '.join(map(str, s.best))}")
    if args.json:
        ranks = [{"problem": s.row.problem.key, "tile": s.row.tile, "rank": s.rank, "tiles": s.tiles} for s in scores]
        top = {name: {f"top_{k}": v for k, v in agreement(part).items()} for name, part in by_size(scores).items()}
        args.json.write_text(json.dumps({"target": target.name, "rows": len(rows), "agreement": top, "ranks": ranks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
