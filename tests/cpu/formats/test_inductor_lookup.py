import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import foreign_rows
from tests.support.foreign_rows import product
from tests.support.nouns import Config, Defaults, Problem, Record, UntunableRowsWarning, WritableFormat, registry
from tests.support.tables import cases, each
from tritongemm.formats.inductor_lookup import key_of

TABLE = registry.get(WritableFormat, "inductor_lookup")
PATH = Path("table.json")

MM = "((torch.bfloat16, [16, 4096], [4096, 1]), (torch.bfloat16, [4096, 6144], [1, 4096]))+mm"
ADDMM = (
    "((torch.bfloat16, [16, 6144], [0, 1]), (torch.bfloat16, [16, 4096], [4096, 1]), "
    "(torch.bfloat16, [4096, 6144], [1, 4096]))+alpha=1&beta=1+addmm"
)
ROW = {
    "template_id": "triton::mm", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4,
    "num_stages": 4, "EVEN_K": True,
}  # fmt: skip
CONFIG = Config("tile", 16, 64, 128, 8, num_warps=4, num_stages=4)


def result(problem: Problem, config: Config = CONFIG, **more: Any) -> Record:
    return foreign_rows.result(problem, config, **{"target": "sm90", **more})


@pytest.mark.heavy  # it imports Inductor; test_what_is_written_is_read_back is quick
def test_keys_are_those_that_torch_makes_and_finds() -> None:
    """With Inductor's own code; it asks a GPU for its name alone."""
    lookup = pytest.importorskip("torch._inductor.lookup_table")
    import torch
    from torch._inductor import config, ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel import mm
    from torch._inductor.kernel_inputs import MMKernelInputs
    from torch._inductor.virtualized import V

    class OnAnH200(lookup.LookupTableChoices):  # type: ignore[misc, name-defined]
        @staticmethod
        def _get_device_key(device: torch.device) -> str:
            return "NVIDIA H200"

        def _get_lookup_table(self) -> Any:
            return config.lookup_table.table

    def operand(name: str, size: list[int], stride: list[int]) -> ir.Buffer:
        return ir.Buffer(name=name, layout=ir.FixedLayout(torch.device("cuda", 0), torch.bfloat16, size, stride))

    a, b = operand("a", [16, 4096], [4096, 1]), operand("b", [4096, 6144], [1, 4096])
    bias = operand("bias", [16, 6144], [0, 1])
    records = [result(product()), result(product(bias="n")), result(product(m=1), winner="torch")]
    table = json.loads(TABLE.translate(records, {}).files[""])
    graph = GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))
    with V.set_graph_handler(graph), config.patch({"lookup_table.table": table}):
        plain, biased = MMKernelInputs([a, b]), MMKernelInputs([bias, a, b], scalars={"alpha": 1, "beta": 1})
        choices = OnAnH200()
        assert choices.make_lookup_key(plain, "mm") == MM == key_of(product())
        assert choices.make_lookup_key(biased, "addmm") == ADDMM == key_of(product(bias="n"))
        keywords = {key: value for key, value in ROW.items() if key != "template_id"}
        uids = [mm.mm_template.uid, mm.aten_mm.uid]
        assert choices.lookup_template_configs(plain, "mm", uids) == {mm.mm_template.uid: [keywords]}
        assert choices.lookup_template_configs(biased, "addmm", uids) == {mm.mm_template.uid: [keywords]}
        first = MMKernelInputs([operand("a", [1, 4096], [4096, 1]), b])
        assert choices.lookup_template_configs(first, "mm", uids) == {mm.aten_mm.uid: [{}]}


@each("bias", ["none", "n"])
@each("a", [True, False])
@each("b", [True, False])
@each("sizes", [(16, 8, 32), (1, 8, 32), (16, 1, 32), (16, 8, 1), (1, 1, 1)])
def test_what_is_written_is_read_back(sizes: tuple[int, int, int], a: bool, b: bool, bias: str) -> None:
    m, n, k = sizes
    given = product(m, n, k, "fp16", row_major_a=a, row_major_b=b, bias=bias)
    config = Config("tile", 16, 32, 64, 4, options=(("kpack", 2), ("waves_per_eu", 1)))
    (text,) = TABLE.translate([result(given, config)], {}).files.values()
    (row,) = TABLE.read(PATH, text, Defaults.of("int8"))
    assert row.config == config and key_of(row.problem) == key_of(given)
    assert json.loads(text)[key_of(given)][0]["EVEN_K"] is (k % 64 == 0)


def test_devices_foreign_rows_and_those_that_are_there() -> None:
    rows = {
        f"NVIDIA H200+{MM}": [{"template_id": "aten::mm"}],
        f"gfx942:sramecc+:xnack-+{ADDMM}": [{"template_id": "triton::mm_persistent_tma"}, ROW],
        MM.replace("+mm", "+bmm"): [ROW],
        MM.replace("bfloat16", "float64"): [ROW],
        MM.replace("[4096, 1]", "[8192, 1]"): [ROW],
        ADDMM.replace("beta=1", "beta=0"): [ROW],
    }
    with pytest.warns(
        UntunableRowsWarning, match=r"row 3 \(line 1\) can't be tuned here: bmm with no scalars .*; nor can 3 others"
    ):
        found = TABLE.read_usable(PATH, json.dumps(rows), Defaults())
    assert [(r.problem, r.config, r.target) for r in found.rows] == [
        (product(), None, "sm90"),
        (product(bias="n"), CONFIG, "gfx942"),
    ]
    text = json.dumps(rows, indent=2)
    (new,) = TABLE.translate([result(product())], {"": text}).files.values()
    assert new == json.dumps({**rows, MM: [ROW]}, indent=2), "all else as it was"
    text = json.dumps({MM: [ROW, {"template_id": "aten::mm"}]}, indent=4)
    assert TABLE.translate([result(product())], {"": text}).files[""] == text, "its first config is the same"
    lost_record = result(product(), winner="torch")
    lost = TABLE.translate([lost_record], {"": text})
    same = result(product(), Config("torch", 0, 0, 0, backend="torch"))
    assert TABLE.translate([same], {"": text}) == TABLE.translate([lost_record], {"": text})
    assert json.loads(lost.files[""]) == {MM: [{"template_id": "aten::mm"}]} and lost.count == 1


@cases(
    (result(product(batch=2)), "looks up mm and addmm of dense operands"),
    (result(product(bias="m")), "looks up mm and addmm"),
    (result(product(bias="n"), winner="torch"), "torch won, and what Inductor races itself stays"),
    (result(product(), winner="blaslt"), "blaslt won, and what Inductor races itself stays"),
    (result(product(), Config("tma", 64, 64, 64)), "tma__bm64__.* won, which is not Inductor's template"),
    (result(product(), Config("tile", 64, 64, 64, split_k=4)), "more than a row holds"),
    (result(product(), timer="model"), "a prediction"),
    (result(product(m=3), target="gfx942", seconds=1.0), "a table is of one target, and this one is of sm90"),
    (result(product(m=32), compute_units=80), "a result of another device of the same target is written"),
)
def test_what_can_not_be_expressed_has_a_reason(record: Record, why: str, /) -> None:
    written = TABLE.translate([result(product(m=32)), record], {})
    assert written.count == 1 and list(json.loads(written.files[""])) == [key_of(product(m=32))]
    ((same, reason),) = written.omitted
    assert same is record and re.search(why, reason) and not TABLE.translate([], {}).files
