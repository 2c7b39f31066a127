from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.tables import gains, products
from scripts.tables.making import TableMaker, list_problems, read_made
from scripts.tables.products import Product
from tests.support.formats import write_text
from tests.support.linear_layers import record
from tests.support.nouns import Patch


@pytest.fixture(scope="module")
def listed() -> Iterator[list[Product]]:
    """All products; those of a model on a number of GPUs are listed once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        known, plain = dict[str, Any](), products._rows

        def rows(entry: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
            if str(entry) not in known:
                known[str(entry)] = plain(entry, values)
            return known[str(entry)]

        patch.setattr(products, "_rows", rows)
        yield products.list_products()


def test_products_are_those_of_the_published_models_the_most_served_first(listed: list[Product]) -> None:
    problems = [product.problem for product in listed]
    assert len(set(problems)) == len(problems) > 200
    assert [(p.problem.n, p.problem.k, p.problem.epilogue, p.high) for p in listed[:6]] == [
        (6144, 4096, "none", 8192),
        (4096, 4096, "none", 8192),
        (28672, 4096, "none", 8192),
        (28672, 4096, "silu_mul", 8192),
        (4096, 14336, "none", 8192),
        (128256, 4096, "none", 512),
    ]
    by_layer = {layer: p.problem for p in listed for layer in p.layers}
    latent = by_layer["DeepSeek-V3, TP 8: fused_qkv_a_proj"]
    assert (latent.n, latent.k, latent.family) == (2112, 7168, "a8w8_blockscale")
    assert latent.a.scaling is not None and latent.a.scaling.pad == (4, 1)  # of vLLM's DeepGEMM, by default
    dense = next(p for p in listed if "Qwen3 8B, TP 1: qkv_proj with dense factors" in p.layers)
    assert dense.high == 3 and dense.problem.a.scaling is not None and dense.problem.a.scaling.pad == (1, 1)
    assert by_layer["gpt-oss 20B, TP 1: qkv_proj"].bias == "n" and by_layer["Qwen3 32B, TP 4: down_proj"].k == 6400
    assert by_layer["Gemma 3 27B, TP 2: gate_up_proj with gelu_tanh_mul"].n == 21504
    assert all(p.a.dtype == p.c.dtype == "bf16" for p in problems if p.family == "dense")


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: Patch, listed: list[Product]) -> None:
    first, ran, said = listed[:12], list[str](), list[str]()

    def tune(self: TableMaker, folder: Path, options: Sequence[str]) -> int | None:
        ran.append(folder.name)
        (folder / "log").write_text("held-out M: 1 % slower\n", encoding="utf-8")
        if len(ran) == 2:
            return None  # the time is over
        made = [record(problem.at(64)) for problem in list_problems(folder)]
        (folder / "tables.yaml").write_text(write_text(*made), encoding="utf-8")
        return 0

    monkeypatch.setattr(TableMaker, "_tune", tune)
    output = tmp_path / "made.yaml"
    TableMaker(first, output, tmp_path / "work", "# made: today\n").run([""], said.append)
    assert ran == ["001_8192", "002_8192"] and len(read_made(output)) == 3
    assert said[-1].endswith("goes on with it") and "held-out" in said[-2]
    again = TableMaker(first, output, tmp_path / "work", "# made: today\n")
    again.run(["0"], said.append)
    assert ran[2] == "002_8192" and not again.products
    assert {record.problem.at(1) for record in read_made(output)} == {product.problem for product in first}
    assert output.read_text(encoding="utf-8").startswith("# made: today\n")


def test_gains_are_those_of_a_models_products_together(tmp_path: Path, listed: list[Product]) -> None:
    (name, layers), *_ = products.list_models()
    made = tmp_path / "made.yaml"
    rows = [record(problem.at(m)) for problem in layers for m in gains.TOKENS if m < 2048 or problem.n < 100_000]
    made.write_text(write_text(*rows), encoding="utf-8")
    lines = list(gains.describe(made))
    assert name == "Llama 3 8B, bf16, TP 1" and len(lines) == 3
    assert lines[2] == f"| {name} | {' | '.join(['1.500'] * 5)} |"
