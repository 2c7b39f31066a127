"""vLLM's module of tiles where batches must not matter: read as data, and written beside what it holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.contracts.test_format import SAMPLES
from tests.support import foreign_rows
from tests.support.foreign_rows import product
from tests.support.nouns import Capsys, Config, Defaults, InputError, Record, ServerFormat, cases, load_target, registry
from tritongemm.cli import convert
from tritongemm.formats import results_format
from tritongemm.tune import servers

TABLE = registry.get(ServerFormat, "vllm_batch_invariant")
NAME, MODULE = SAMPLES["vllm_batch_invariant"]
CONFIG = Config("tile", 16, 64, 128, 8, num_warps=4, num_stages=4)


def result(m: int, config: Config = CONFIG, **more: Any) -> Record:
    return foreign_rows.result(product(m), config, **{"target": "sm90", **more})


def tiles(text: str) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
    """What vLLM has of Hopper's dict after it ran the module: the depth, then the tile of each M."""
    values = {"_MatmulShapeConfig": lambda **words: words, "_MatmulMConfig": lambda *numbers: numbers}
    exec(text.partition("import torch")[2], values)
    found: Any = values["_BATCH_INVARIANT_MATMUL_TUNED_CONFIGS"]
    return {key: {0: (s["block_k"],), **dict(s["m_buckets"])} for key, s in found["hopper"].items()}


@cases(MODULE, MODULE.replace("       ),\n   },", "       )  # one, two\n   },"), MODULE.replace("\n", "\r\n"))
def test_results_are_written_beside_what_is_there(module: str, /) -> None:
    deep, wide = replace(CONFIG, block_k=64), replace(CONFIG, block_n=128, options=(("early", 0), ("xcds", 1)))
    given = [
        result(1),
        result(64, wide),
        result(4, deep),
        result(8, replace(CONFIG, group_m=4)),
        result(16, winner="torch"),
    ]
    written = TABLE.translate([*given, result(1, target="sm100"), result(2, timer="model")], {NAME: module})
    n, k = product().n, product().k
    text = written.files[NAME]
    assert tiles(text) == tiles(module) | {(n, k): {0: (128,), 1: (16, 64, 4, 4), 64: (16, 128, 4, 4)}}
    reasons = " ".join(reason for _, reason in written.omitted)
    assert written.count == 2 and len(written.omitted) == 5
    assert all(word in reasons for word in ("here 128", "can't be", "no GPUs of sm100, only hopper", "a prediction")), (
        reasons
    )
    assert TABLE.translate(given[:2], {"": text}).files == {}, "it has them"
    assert [(r.problem, r.config, r.target) for r in TABLE.read(Path(NAME), text, Defaults())][-2:] == [
        (product(1), CONFIG, "sm90"), (product(64), replace(wide, options=()), "sm90")
    ]  # fmt: skip
    other = TABLE.translate([result(64, deep)], {NAME: text}).files[NAME]
    assert tiles(other)[n, k] == {0: (64,), 64: (16, 64, 4, 4)}, "tiles of another depth are gone"
    assert sorted(tiles(TABLE.translate([result(8)], {NAME: text}).files[NAME])[n, k]) == [0, 1, 8, 64]


@cases(
    ("x = ", "is not the text of a Python module"),
    ("x = 1", "has no _BATCH_INVARIANT_MATMUL_TUNED_CONFIGS"),
    ("\n_BATCH_INVARIANT_MATMUL_TUNED_CONFIGS = {1: {}}", "line 2: .* must be a dict of dicts"),
    (MODULE.replace("(16, 128, 4, 3)", "(16, 128, 4)", 1), "a tile of block_m, block_n, num_warps and num_stages"),
    (MODULE.replace("block_k=64", "block_k=open('x')", 1), "block_k must be a whole number"),
    (MODULE.replace("(5, 6)", "(2, 3)"), r"row 2 \(line 11\) \(2, 3\) is there twice for hopper"),
)
def test_a_damaged_module_is_named(text: str, complaint: str, /) -> None:
    with pytest.raises(InputError, match=f"^{NAME}.*{complaint}"):
        TABLE.read(Path(NAME), text, Defaults())


def test_they_are_converted_and_searched(tmp_path: Path, capsys: Capsys) -> None:
    ours, module = tmp_path / "ours.yaml", tmp_path / NAME
    ours.write_text(results_format().write([result(16)]), encoding="utf-8")
    words = [str(ours), "-o", str(module), "--to", TABLE.name]
    assert convert.main(words) == 2 and "name a copy of vLLM's" in capsys.readouterr().err
    module.write_text(MODULE)
    assert convert.main(words) == 0 and 16 in tiles(module.read_text())[product().n, product().k]
    assert [row.problem.m for row in TABLE.list_sizes(6144, 4096, Defaults.of("bf16", layout="TN"))][::9] == [1, 2048]
    assert servers.server_format("vllm-invariant").limits("dense", load_target("sm90")).allow(CONFIG)
    with pytest.raises(InputError, match="no tables of family dense of fp16; choose --family: dense of bf16"):
        TABLE.list_sizes(6144, 4096, Defaults.of("fp16", layout="TN"))
