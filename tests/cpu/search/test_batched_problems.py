"""What the search makes of a batch: programs of all products fill the GPU, and each reads operands of its own."""

from dataclasses import replace

from tests.support.covering import pairwise
from tests.support.kernel_cases import GFX942, SM90
from tests.support.tables import each
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.target import Target
from tritongemm.plugins.validity import check_config
from tritongemm.search.cost_model import model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

BATCH = Problem(16, 512, 512, *matrices("bf16", layout="TN"), batch=128)


@each(("target", "m", "shared"), pairwise([SM90, GFX942], [1, 16, 256], ["", "a", "b"]))
def test_no_prediction_is_beyond_the_roofline(target: Target, m: int, shared: str) -> None:
    problem = replace(BATCH, m=m, a=BATCH.a._replace(shared=shared == "a"), b=BATCH.b._replace(shared=shared == "b"))
    kept = prune.prune(space(problem, target), problem, target).kept
    predictions = model.rank(kept, problem, target)
    least = target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)
    assert least < predictions[0].seconds < 20 * least + 2e-5
    assert {c.template for c in predictions.configs} <= {"tile", "gemv", "tma"}


def test_a_batch_fills_the_gpu_without_splits() -> None:
    one = replace(BATCH, batch=1, n=64, k=4096)
    alone, together = (
        {c.split_k for c in prune.prune(space(p, SM90), p, SM90).kept} for p in (one, replace(one, batch=128))
    )
    assert max(alone) > 1 and together == {1}


def test_what_is_kept_can_be_compiled() -> None:
    """No budget goes to configs that are refused: descriptors would read the next product's rows."""
    problem = Problem(64, 512, 192, *matrices(layout="NT"), batch=4)
    kept = prune.prune(space(problem, SM90), problem, SM90).kept
    assert any(config.template == "tma" for config in kept)
    assert not [config for config in kept if not check_config(config, problem, SM90)]


def test_a_shared_operand_is_read_once() -> None:
    config = model.rank(prune.prune(space(BATCH, SM90), BATCH, SM90).kept, BATCH, SM90).configs[0]
    own, shared = (
        model.predict(config, p, SM90).seconds for p in (BATCH, replace(BATCH, b=BATCH.b._replace(shared=True)))
    )
    assert shared < own
