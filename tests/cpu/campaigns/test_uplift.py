import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nouns import OutputError, cases, refuses
from tritongemm.campaigns import raw_results
from tritongemm.campaigns.stages import benchmark
from tritongemm.campaigns.tables import SUMMARY
from tritongemm.campaigns.uplift import ComparedProduct, drop_reason, percent_of_total, summarise


def compared(name: str, count: float, us: float, ratio: float = 1.0, **other: object) -> ComparedProduct:
    facts = {"error_reference": 0.0, "error_tuned": 1e-4, "tolerance": 1e-3, "kernel_tuned": "found", **other}
    times = ((us * 1e-6,),), ((us * 1e-6 / ratio,),)
    own = ComparedProduct(name, count, "own", "found", *times)
    return replace(own, **facts)  # type: ignore[arg-type]


def test_the_guides_example() -> None:
    """A: 100 us ten times; B: 10 us in two rows of 25, summed; C: 1 us once, which the threshold cut off."""
    percents = percent_of_total([10 * 100.0, 2 * 25 * 10.0, 1.0])
    assert [round(percent, 3) for percent in percents] == [66.622, 33.311, 0.067]
    a, b = compared("a", 10, 100, 1.25), compared("b", 50, 10, 1.02)
    assert {p.problem: drop_reason(p) for p in (a, b)} == {"a": "", "b": "ratio 1.020 is less than 1.03"}
    uplift = summarise([a], [a, b], rest_seconds=1e-6)
    assert round(100 * uplift.average, 2) == round(100 * uplift.geometric, 2) == 25
    assert round(100 * uplift.weighted, 2) == 13.32 and round(100 * uplift.share, 2) == 66.62
    assert "1 of 2 GEMMs kept" in uplift.describe() and "13.32%" in uplift.describe() and "1.154" in uplift.describe()


@cases(
    (compared("a", 1, 10, 1.03), ""),
    (compared("a", 1, 10, 2.0, kernel_tuned="own"), "the kernel did not change"),
    (compared("a", 1, 10, 2.0, error_tuned=2e-3), "error 0.002 is more than the 0.001"),
    (compared("a", 1, 10, 2.0, error_tuned=float("inf")), "error inf is more"),
    (compared("a", 1, 10, 2.0, error_tuned=None), "not verified"),
    (compared("a", 1, 10, 2.0, samples_tuned=()), "not measured"),
    (compared("a", 1, 10, 2.0, failure="the tuned kernel: wrong"), "the tuned kernel: wrong"),
)
def test_why_a_kernel_is_not_kept(product: ComparedProduct, reason: str, /) -> None:
    found = drop_reason(product)
    assert bool(found) == bool(reason) and reason in found


RATIOS = st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.1, 1e4), st.floats(1.03, 50)), min_size=1, max_size=8)


@given(RATIOS, st.floats(0, 1))
def test_the_weighted_uplift_is_the_time_that_is_saved(given_: list[tuple[float, float, float]], rest: float) -> None:
    products = [compared(str(i), *values) for i, values in enumerate(given_)]
    uplift = summarise(products, products, rest)
    before = rest + sum(count * us * 1e-6 for count, us, _ in given_)
    after = rest + sum(count * us * 1e-6 / ratio for count, us, ratio in given_)
    assert uplift.weighted == pytest.approx(1 - after / before) and 0 < uplift.weighted < 1
    assert uplift.geometric <= uplift.average * (1 + 1e-9) and summarise([], products, rest).weighted == 0


def test_every_sample_is_read_back_and_results_of_others_are_not_replaced(tmp_path: Path) -> None:
    samples = ((1.25e-5, 1.5e-5), (1.125e-5,))
    product = compared("16x16x32_fp16_TT", 7, 10, samples_reference=samples, failure='a "crash",\nsuddenly')
    product = replace(product, columns=(("m", "16"), ("transA", "T"), ("problem", "other")))
    raw_results.write_products(tmp_path / "raw.csv", [product, compared("b", 1, 5)], rest_seconds=1e-5)
    (row, _) = csv.DictReader((tmp_path / "raw.csv").open(encoding="utf-8"))
    assert row["samples_us_reference"] == "12.5 15;11.25" and row["m"] == "16" and row["call_count"] == "7"
    assert row["problem"] == product.problem and row["us_reference"] == "12.5"
    back, _ = raw_results.read_products(tmp_path / "raw.csv")
    assert back.samples_reference == samples and back.columns == (("m", "16"), ("transA", "T"))
    assert back.ratio == pytest.approx(product.ratio) and back.failure.startswith('a "crash"')
    path = tmp_path / "results" / "raw_results.csv"
    path.parent.mkdir()
    path.write_text("transA,transB,us_reference,us_tuned\n", encoding="utf-8")
    with pytest.raises(OutputError, match=r"raw_results.csv is not a table of a campaign; move it away"):
        raw_results.write_products(path, [compared("b", 1, 5)])
    path.unlink()
    for _ in range(2):
        raw_results.write_products(path, [compared("b", 1, 5)])


@cases(
    ("problem,", "size,", "line 1 has no column problem"),
    ("call_count", "calls", "line 1 has no column call_count"),
    (",found", "", r"row 1 \(line 2\) has \d+ cells, the head \d+; it may be cut"),
    ("0.0001", "nan", r"row 1 \(line 2\) error_tuned must be a number from 0 on, not 'nan'"),
    (",10,", ",0,", "must hold times above 0"),
    ("\na,", '\n"a,', "unexpected end of data"),
)
def test_a_damaged_file_is_named(old: str, new: str, complaint: str, /, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    raw_results.write_products(path, [compared("a", 1, 10)])
    text = path.read_text(encoding="utf-8")
    head, row = text.split("\n", 1)
    changed = text.replace(old, new) if old in head else head + "\n" + ("\n" + row).replace(old, new)[1:]
    if new == ",0,":
        changed = head + "\n" + row.replace("10,10\n", "0,0\n")
    path.write_text(changed, encoding="utf-8")
    refuses(complaint, raw_results.read_products, path)


def test_what_could_not_be_compared_counts_in_the_total(tmp_path: Path) -> None:
    """By the summary's time: else the others would seem to save more of the log's time than they do."""
    (tmp_path / SUMMARY).write_text("problem,total (us),baseline\na,100,measured\nb,300,measured\n", encoding="utf-8")
    lost = compared("b", 10, 30, samples_reference=(), failure="the reference: the GPU is gone")
    assert benchmark.read_uncompared(tmp_path, [compared("a", 10, 10), lost]).seconds == pytest.approx(300e-6)
    assert not benchmark.read_uncompared(tmp_path, [compared("a", 10, 10), compared("b", 10, 30)]).seconds
