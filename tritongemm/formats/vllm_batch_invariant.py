"""Format: vLLM's tiles where batches must not matter, in its ``determinism/batch_invariant_configs.py``.

Each family of GPUs has a dict of (N, K), with one BLOCK_K and a tile for each range of M, which ends with the M that is
written. The file is parsed, never run; what is no tile in it stays byte for byte.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile, Translation
from tritongemm.core.problem import DEFAULT_FAMILY, Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.space import SearchLimits
from tritongemm.core.target import Target
from tritongemm.formats._rows import KeptError, RowFaults, by_device, make_problem
from tritongemm.formats._tile_rows import Kind, find_kind
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.system.printable import printable

_NAME, _TABLE = "batch_invariant_configs.py", "_BATCH_INVARIANT_MATMUL_TUNED_CONFIGS"
_FAMILIES = {"ada": "sm89", "hopper": "sm90", "blackwell": "sm100", "sm120": "sm120"}
_FAMILY_OF = {target: family for family, target in _FAMILIES.items()}
_LADDER = (1, 4, 8, 16, 32, 64, 256, 512, 1024, 2048)
_GROUP, _DEPTH = 8, 128  # of rows of tiles, always; elements of K of a block, where nothing is written yet
_USUAL = {"runs": 1, "xcds": 1}  # options that do nothing, beside those that are 0
_KIND = Kind(DEFAULT_FAMILY, "bf16")
_Product = tuple[str, int, int]  # family of GPUs, N and K


class VllmBatchInvariant(ServerFormat):
    """The tiles of vLLM's kernel for plain layers where batches must not matter."""

    title = f"vLLM's {_NAME}"
    suffixes = (".py",)
    server = "vLLM-invariant"

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether a file has the module's name, or defines its table."""
        return path.name == _NAME or re.search(rf"^{_TABLE}\b", text, re.MULTILINE) is not None

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a row for each M of each product, in the order of the file."""
        rows, faults, seen = list[FormatRow](), RowFaults(path), set[_Product]()
        for number, (family, key, value) in enumerate(_entries(_dicts(path, text)), start=1):
            with faults.of_row(number, key.lineno, printable(ast.unparse(key), 60)):
                n, k = _product(key)
                if (family, n, k) in seen:
                    raise InputError(f"is there twice for {family}; keep one of them")
                if family not in _FAMILIES:
                    raise KeptError(f"no target is known of the family {printable(family)}")
                seen.add((family, n, k))
                depth, tiles = _shape(value)
                for m, (line, tile) in tiles.items():
                    problem = make_problem(Defaults(), m, n, k, _KIND.given)
                    rows.append(
                        FormatRow(problem, _config(depth, tile), line=line, number=number, target=_FAMILIES[family])
                    )
        return faults.beside(rows)

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return the module with these results, beside what it has for other products and other M."""
        name = "" if before.get("") else _NAME
        text, omitted = before.get(name, ""), list[tuple[Record, str]]()
        dicts = _dicts(Path(_NAME), text) if text else {}
        found: dict[_Product, dict[int, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for rivals in by_device(records):
            usable = [r for r in rivals if r.winner == r.config.backend and self.can_express(r.config)]
            if reason := _why_not(rivals[0], dicts):
                omitted.append((rivals[0], reason))
            elif not usable:
                omitted.append((rivals[0], f"{rivals[0].config.name} won, which the server's kernel can't be"))
            for record in [] if reason else usable:
                of_depth = found[_FAMILY_OF[record.target], record.problem.n, record.problem.k][record.config.block_k]
                known = of_depth.setdefault(record.problem.m, record)
                of_depth[record.problem.m] = min(known, record, key=lambda one: one.seconds)
        edits, written = list[tuple[int, int, bytes]](), 0
        for (family, n, k), depths in found.items():
            depth = min(depths, key=lambda one: (-len(depths[one]), sum(r.seconds for r in depths[one].values())))
            others = {m: record for tiles in depths.values() for m, record in tiles.items() if m not in depths[depth]}
            omitted += [(r, f"all M of a product have one BLOCK_K, here {depth}") for r in others.values()]
            edits.append(_edit(text.encode(), dicts[family], (n, k), depth, depths[depth]))
            written += len(depths[depth])
        new = text.encode()
        for start, end, replacement in sorted(edits, reverse=True):
            new = new[:start] + replacement + new[end:]
        if new != text.encode():
            _dicts(Path(_NAME), new.decode())
        return Translation({name: new.decode()} if new != text.encode() else {}, written, tuple(omitted))

    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """Return a size for each M of vLLM's own tables."""
        find_kind((_KIND,), self.server, defaults.family, defaults.a.dtype)
        return [FormatRow(make_problem(Defaults(), m, n, k, _KIND.given)) for m in tokens or _LADDER]

    def limits(self, family: str, target: Target) -> SearchLimits:
        """Return the template that is the server's kernel, with one depth of K and its order of tiles."""
        find_kind((_KIND,), self.server, family, _KIND.dtype)
        return SearchLimits(1, (_KIND.template,), (("block_k", (_DEPTH,)), ("group_m", (_GROUP,))), ())

    def can_express(self, config: Config) -> bool:
        """Return whether the server's kernel can have a config's tile and pipeline."""
        usual = all(value == _USUAL.get(name, 0) for name, value in config.options)
        return usual and replace(config, options=()) == _config(config.block_k, _tile(config))


def _why_not(record: Record, dicts: Mapping[str, ast.Dict]) -> str:
    """Return why no row can have a result; "" if one can."""
    problem = record.problem
    if problem != Problem(problem.m, problem.n, problem.k, *matrices("bf16", layout="TN")):
        return "vLLM's table is of plain products of bf16 by a linear layer's weight, without bias"
    if record.predicted:
        return "its time is a prediction, which no timer measured"
    if not dicts:
        return f"name a copy of vLLM's {_NAME}, into which tiles are written"
    if _FAMILY_OF.get(record.target) not in dicts:
        return f"the file has no GPUs of {printable(record.target)}, only {printable(', '.join(dicts), 80)}"
    return ""


def _dicts(path: Path, text: str) -> dict[str, ast.Dict]:
    """Return the dict of each family of GPUs."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is not the text of a Python module: {printable(str(error), 100)}") from None
    for node in body:
        names = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(name, ast.Name) and name.id == _TABLE for name in names):
            table = node.value  # type: ignore[attr-defined]
            if isinstance(table, ast.Dict):
                families = [(_text(key), value) for key, value in zip(table.keys, table.values, strict=True)]
                if all(family and isinstance(value, ast.Dict) for family, value in families):
                    return {family: value for family, value in families if isinstance(value, ast.Dict)}
            raise InputError(f"{path}: line {node.lineno}: {_TABLE} must be a dict of dicts by families of GPUs")
    raise InputError(f"{path} has no {_TABLE}, the table of vLLM's {_NAME}")


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _entries(dicts: Mapping[str, ast.Dict]) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yield family, key and value of all products."""
    for family, entries in dicts.items():
        for key, value in zip(entries.keys, entries.values, strict=True):
            yield family, key or value, value


def _integer(node: ast.expr, what: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 < node.value < 2**31:
        return node.value
    raise InputError(f"{what} must be a whole number from 1 to {2**31 - 1}, not {printable(ast.unparse(node), 40)}")


def _product(key: ast.expr) -> tuple[int, int]:
    if not (isinstance(key, ast.Tuple) and len(key.elts) == 2):
        raise InputError("a product must be (N, K)")
    return _integer(key.elts[0], "N"), _integer(key.elts[1], "K")


def _shape(value: ast.expr) -> tuple[int, dict[int, tuple[int, tuple[int, ...]]]]:
    """Return the depth of a product's blocks, and by M the line and the numbers of its tile."""
    given = {word.arg: word.value for word in value.keywords} if isinstance(value, ast.Call) else {}
    buckets = given.get("m_buckets")
    if not isinstance(value, ast.Call) or value.args or given.keys() != {"block_k", "m_buckets"}:
        raise InputError("must have block_k and m_buckets, by name")
    if not isinstance(buckets, ast.Tuple) or not buckets.elts:
        raise InputError("m_buckets must be a tuple of (M, tile)")
    tiles: dict[int, tuple[int, tuple[int, ...]]] = {}
    for bucket in buckets.elts:
        tile = bucket.elts[1] if isinstance(bucket, ast.Tuple) and len(bucket.elts) == 2 else None
        if not (
            isinstance(bucket, ast.Tuple) and isinstance(tile, ast.Call) and len(tile.args) == 4 and not tile.keywords
        ):
            raise InputError("m_buckets must be pairs of M and a tile of block_m, block_n, num_warps and num_stages")
        words = ("block_m", "block_n", "num_warps", "num_stages")
        m = _integer(bucket.elts[0], "M")
        if m <= max(tiles, default=0):
            raise InputError(f"M {m} must be larger than the one before")
        tiles[m] = bucket.lineno, tuple(_integer(node, word) for node, word in zip(tile.args, words, strict=True))
    return _integer(given["block_k"], "block_k"), tiles


def _tile(config: Config) -> tuple[int, ...]:
    return config.block_m, config.block_n, config.num_warps, config.num_stages


def _config(depth: int, tile: tuple[int, ...]) -> Config:
    return Config(_KIND.template, tile[0], tile[1], depth, _GROUP, num_warps=tile[2], num_stages=tile[3])


def _edit(
    text: bytes, entries: ast.Dict, product: tuple[int, int], depth: int, chosen: Mapping[int, Record]
) -> tuple[int, int, bytes]:
    """Return which bytes of a module are replaced, and by what, so that a product has these tiles."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def end_of(node: ast.expr) -> int:
        return starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    tiles: dict[int, tuple[int, ...]] = {}
    place, value = end_of(entries.values[-1]) if entries.values else end_of(entries) - 1, None
    for key, each in zip(entries.keys, entries.values, strict=True):
        if key is not None and ast.unparse(key) == str(product):
            value, place = each, starts[each.lineno - 1] + each.col_offset
            with suppress(InputError):  # what can't be read is replaced
                before, known = _shape(value)
                tiles = {m: tile for m, (_, tile) in known.items()} if before == depth else {}
    new = tiles | {m: _tile(record.config) for m, record in chosen.items()}
    if new == tiles:
        return place, place, b""
    lines = "".join(f"                ({m}, _MatmulMConfig{new[m]}),\n" for m in sorted(new))
    shape = (
        f"_MatmulShapeConfig(\n            block_k={depth},\n            m_buckets=(\n{lines}            ),\n        )"
    )
    if value is not None:
        return place, end_of(value), shape.encode()
    return place, place, (f",\n        {product}: {shape}" if entries.values else f"{product}: {shape}, ").encode()
