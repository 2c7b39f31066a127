"""The families that messages offer in place of one that a target can't compute."""

from collections.abc import Iterator
from dataclasses import replace

from tests.support.nouns import Patch, Problem, Target, cases, load_target, matrices
from tritongemm.numerics import computable_families
from tritongemm.numerics.computable_families import name_others


@cases(
    ("gfx950", {"dense", "a8w8", "a8w8_blockscale", "a4w4_blockscale", "a4w4_bpreshuffle"}, set[str]()),
    ("gfx942", {"a8w8", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale"}, set[str]()),
    ("sm80", {"dense", "a8w8"}, {"a4w4_blockscale", "a4w4_bpreshuffle"}),
)
def test_what_a_target_computes(target: str, able: set[str], unable: set[str], /) -> None:
    nowhere = Problem(16, 256, 256, family="of a plug-in that is gone")
    found = {*name_others(nowhere, load_target(target)).partition("families ")[2].split(", ")}
    assert able <= found and not unable & found


def test_others_are_named_for_a_family_that_is_not_computed() -> None:
    fp4 = Problem(16, 256, 256, *matrices("fp4e2m1", c="bf16", order="shuffled_16x16"), family="a4w4_blockscale")
    assert name_others(fp4, load_target("gfx950")) == ""
    assert name_others(fp4, load_target("gfx90a")).startswith("; gfx90a computes the families a16w4,")
    odd = Problem(16, 256, 255, *matrices("fp8e4m3fn", c="bf16", layout="TN"), family="a8w8_blockscale")
    assert name_others(odd, load_target("gfx942")) == "", "its size is wrong, not its family"


def test_thousands_of_rows_ask_once_what_a_target_computes(monkeypatch: Patch) -> None:
    asked: list[str] = []

    def typical(name: str, target: Target) -> Iterator[Problem]:
        asked.append(name)
        return iter(())

    monkeypatch.setattr(computable_families, "_typical", typical)
    nowhere, alone = Problem(16, 256, 256, family="gone"), replace(load_target("sm90"), name="of this test")
    assert [name_others(nowhere, alone) for _ in range(2)] and len(asked) == len(set(asked)) > 5
