from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.nouns import Config, Defaults, Family, FormatRow, Record, TunerFormat, load_target, registry
from tests.support.stores import take
from tests.support.tables import cases, each
from tritongemm.core.errors import InputError, UntunableRowsWarning
from tritongemm.results.tuned_file import TunedFile
from tritongemm.tune.request import SizeSource, TuneRequest
from tritongemm.tune.requested_rows import read_rows

KEYS = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
FP8 = "torch.float8_e4m3fn"
BF16 = "512,6144,4096,8,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0"
ROWS = f"4,2304,1536,8,2,ActivationType.Gelu,torch.bfloat16,{FP8},{FP8},QuantType.per_Token,0,1"
BLOCKS = f"16,7168,256,256,8,ActivationType.Silu,torch.bfloat16,{FP8},{FP8},QuantType.per_1x128,1,0"
UNTUNED = "\n".join([KEYS, BF16, ROWS, BLOCKS, ""])
TILE = Config("tile", 16, 64, 128)
ANY = ("gfx942", "gfx950", "sm90")


def read(text: str, name: str = "untuned_fmoe.csv") -> list[FormatRow]:
    return registry.get(TunerFormat, "aiter").read(Path(name), text, Defaults())


def result(row: FormatRow, seconds: float = 5e-6, **more: object) -> Record:
    facts = {"target": "sm90", "compute_units": 132, "toolchain": {"torch": "2.13.0"}, **more}
    return Record(row.problem, config=TILE, winner="triton", seconds=seconds, spread=0.0, timer="events", **facts)  # type: ignore[arg-type]


def test_a_layer_is_two_products_of_groups_for_experts_that_there_are() -> None:
    sizes = [(r.problem.m, r.problem.n, r.problem.k, r.problem.group_count, r.problem.family) for r in read(UNTUNED)]
    assert sizes == [
        (1024, 8192, 6144, 8, "dense"),
        (1024, 6144, 4096, 8, "dense"),
        (8, 1536, 2304, 8, "a8w8"),
        (8, 2304, 1536, 8, "a8w8"),
        (128, 512, 7168, 256, "a8w8_blockscale"),
        (128, 7168, 256, 256, "a8w8_blockscale"),
    ]
    assert {(r.problem.layout, r.problem.c.dtype) for r in read(UNTUNED)} == {("TN", "bf16")}
    with pytest.raises(InputError, match=r"\(line 4\) topk is 257, of 256 experts"):
        read(UNTUNED.replace("16,7168,256,256,8,", "16,7168,256,256,257,"))
    found = read(f"{KEYS}\n{BLOCKS.replace('per_1x128', 'per_Tensor')}\n")
    assert [(p.family, p.scales, p.group_count) for p in (row.problem for row in found)] == [("a8w8", "", 256)] * 2


@cases(
    ("torch.float4_e2m1fn_x2,torch.float4_e2m1fn_x2", "a4w4_blockscale", "", ("gfx950",)),
    (f"{FP8},{FP8}", "a8w8_blockscale", "mx_shuffled", ("gfx950",)),
    (f"{FP8},torch.float4_e2m1fn_x2", "a8w4", "mx", ANY),
    ("torch.bfloat16,torch.float4_e2m1fn_x2", "a16w4", "weight_mx", ANY),
    ("torch.bfloat16,torch.int4", "a16w4", "weight_32", ANY),
)
def test_experts_of_powers_of_two_and_mixed_types(types: str, family: str, scales: str, on: tuple[str, ...], /) -> None:
    row = BLOCKS.replace(f"{FP8},{FP8},QuantType.per_1x128", f"{types},QuantType.per_1x32")
    found = [row.problem for row in read(f"{KEYS}\n{row}\n")]
    assert [(p.m, p.n, p.k, p.group_count) for p in found] == [(128, 512, 7168, 256), (128, 7168, 256, 256)]
    assert {(p.family, p.scales, p.c.dtype) for p in found} == {(family, scales, "bf16")}
    assert on == ANY or {p.operands["scale_a"].order for p in found} == {"e8m0_32x8"}
    for target in on:
        assert all(registry.get(Family, family).supports(p, load_target(target)) for p in found)


def test_experts_of_four_bits_are_tuned_and_read_back_in_the_order_that_is_fastest(tmp_path: Path) -> None:
    line = BLOCKS.replace(f"{FP8},{FP8},QuantType.per_1x128", "torch.bfloat16,torch.int4,QuantType.per_1x32")
    (path := tmp_path / "untuned_fmoe.csv").write_text(f"{KEYS}\n{line}\n", encoding="utf-8")
    source = TuneRequest(SizeSource(path=path))
    asked = {t: read_rows(source, load_target(t), lambda _: None).rows for t in ("sm90", "gfx950")}
    assert {r.problem.b.order for r in asked["gfx950"]} == {"plain"}
    kernel = Config("grouped_fragments", 8, 64, 128, 1, 1, 2, 2, (("slices", 2), ("swap_ab", 1)))
    plugin = registry.get(TunerFormat, "aiter")
    plain = Config("grouped", 16, 64, 64, 1, 1, 4, 2)
    for rows, config in ((asked["sm90"], kernel), (read(f"{KEYS}\n{line}\n"), plain)):
        written = plugin.translate_rows(rows, [replace(result(r), config=config) for r in rows], {"": ""}).files[""]
        assert [r.problem for r in read(written, "tuned_fmoe.csv")] == [r.problem for r in rows]
    assert {r.problem.b.order for r in asked["sm90"]} == {"fragments"}


@cases(
    ("QuantType.per_1x128", "QuantType.per_256x128", "no family here has experts with scales per_256x128"),
    ("16,7168,256,256,8,", "16,7168,256,256,-1,", "topk -1 does not say"),
    (f"{FP8},{FP8},QuantType.per_1x128", f"{FP8},torch.int4,QuantType.per_1x32", "multiplied by no"),
)
def test_other_scales_are_kept_and_named(given: str, other: str, reason: str, /) -> None:
    with pytest.warns(UntunableRowsWarning, match=rf"row 3 \(line 4\) can't be tuned here: .*{reason}"):
        assert len(read(UNTUNED.replace(given, other))) == 4


def test_a_line_without_its_last_empty_cell_counts() -> None:
    """AITER's own files have such lines (glm5_fp4_tuned_fmoe.csv); they stay byte for byte where others are merged."""
    text = f"gfx,cu_num,{KEYS},us,_tag\ngfx950,256,{BLOCKS},9.5\ngfx950,256,{ROWS},7,\n"
    assert [row.line for row in read(text, "tuned_fmoe.csv")] == [2, 2, 3, 3]
    plugin, path = registry.get(TunerFormat, "aiter"), Path("tuned_fmoe.csv")
    faster = text.replace("9.5", "8.5,").replace(ROWS, BF16)
    merged = plugin.merge([(path, text), (path, faster)])
    assert merged is not None and merged.text.splitlines()[1:] == [
        faster.splitlines()[1],
        text.splitlines()[2],
        faster.splitlines()[2],
    ]
    (damaged,) = plugin.read_usable(path, text.replace(",9.5", ""), Defaults()).damaged
    assert damaged.reason.endswith("has 14 values for 16 columns; write one for each, with commas between them")


def test_both_results_of_a_layer_are_one_row_that_is_read_back(tmp_path: Path) -> None:
    rows = read(UNTUNED)
    written = TunedFile.find(tmp_path / "tuned_fmoe.csv")
    assert written is not None
    with take(written.results, target="sm90", compute_units=132, toolchain={"torch": "2.13.0"}) as store:
        for number, row in enumerate(rows[:3]):  # of the second layer one product alone
            store.add_trials(row.problem, [], result(row, (number + 1) * 1e-5))
        found = written.write(store, [row.problem for row in rows], rows)
    head, line = (tmp_path / "tuned_fmoe.csv").read_text(encoding="utf-8").splitlines()
    assert head == f"gfx,cu_num,{KEYS},block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw"
    assert line.startswith(f"sm90,132,{BF16},16,1,10.0,{TILE.name},0.0%,20.0,{TILE.name},0.0%,30.0,0,")
    assert [reason for _, reason in found.omitted] == ["the other product of its layer has no result"]
    again = read(f"{head}\n{line}\n", "tuned_fmoe.csv")
    assert [r.problem for r in again] == [r.problem for r in rows[:2]]
    assert [r.record and r.record.seconds for r in again] == [1e-5, 2e-5]
    here = replace(load_target("sm90"), compute_units=132)
    assert [row.number for row in written.wanted(rows, None, here, False)[0]] == [2, 2, 3, 3]


@each(
    ("other", "reason"), [({"timer": "model"}, "a prediction"), ({"target": "gfx942"}, "kernels of AITER's own alone")]
)
def test_what_can_not_be_expressed_is_named(other: dict[str, str], reason: str) -> None:
    rows = read(UNTUNED)[:2]
    records = [replace(result(row), **other) for row in rows]  # type: ignore[arg-type]
    found = registry.get(TunerFormat, "aiter").translate_rows(rows, records, {"": ""})
    assert not found.count and reason in found.omitted[0][1]
