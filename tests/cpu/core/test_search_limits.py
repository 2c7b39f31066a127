"""What of a search space may be tried."""

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.space import SearchLimits
from tritongemm.search import space
from tritongemm.search_spaces.loader import load_target

PROBLEM = Problem(64, 512, 1024, *matrices("bf16", layout="TN"))
ENTIRE = space.space(PROBLEM, load_target("sm90"))


def test_without_limits_nothing_changes() -> None:
    assert SearchLimits().narrow(ENTIRE) == ENTIRE
    assert SearchLimits().allow(Config("asm", 64, 64, 64, split_k=9, backend="asm"))


def test_what_another_programs_kernel_takes() -> None:
    """Options that it has not are left out, so that configs do not name them: the kernel's defaults hold."""
    narrow = SearchLimits(1, ("tile",), (("block_k", (32, 64, 128)),), ()).narrow(ENTIRE)
    assert [a.template for a in narrow.axes] == ["tile"]
    configs = list(narrow)
    assert configs and {c.split_k for c in configs} == {1} and {c.block_k for c in configs} == {32, 64, 128}
    assert {c.options for c in configs} == {()}


def test_splits_are_limited_for_every_kernel() -> None:
    limits = SearchLimits(2)
    splits = {split for axes in limits.narrow(ENTIRE).axes for split in dict(axes.values)["split_k"]}
    assert splits <= {1, 2} and len(ENTIRE) > len(limits.narrow(ENTIRE)) > 0
    assert not limits.allow(Config("asm", 64, 64, 64, split_k=3, backend="asm"))
    assert not len(SearchLimits(templates=("no_such",)).narrow(ENTIRE))
