"""Kernels that are wrong do not pass the check without a GPU: edits of right ones, each at a size that it spoils.

What no interpreter can notice is in docs/reference/support.md.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.kernel_cases import GFX942, PLAIN, SM90, SPLIT
from tests.support.nouns import Artifact, Config, Groups, Patch, Problem, Target, Trial, apart, matrices, registry
from tests.support.products import product
from tritongemm.codegen import modules
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins.contracts import SearchedBackend
from tritongemm.system.child_process import WorkerProcess

NARROW = Problem(150, 150, 350, *matrices(), bias="n")
EVEN = Problem(144, 144, 320, *matrices())
BLOCKS = product("a8w8_blockscale", 40, 1000, 1024, "fp8e4m3fnuz")
GROUPS, GROUPED = Problem(90, 48, 64, *matrices(), groups=Groups(4)), Config("grouped", 16, 16, 32)
GATED = Problem(40, 96, 350, *matrices(layout="TN"), epilogue="gelu_mul")
IN_BLOCKS = Problem(40, 768, 160, *matrices("bf16", c="fp8e4m3fn", layout="TN"), epilogue="silu_mul_block")
BLOCK_TILE = Config("tile", 16, 32, 64)
FOUR_SPLITS = Config("tile", 16, 16, 16, split_k=4)  # of 10 blocks
POLLED = replace(FOUR_SPLITS, options=(("poll", 1),))
PERSISTENT = Config("persistent", 16, 16, 32, options=(("epilogue_parts", 2),))
STREAM = Config("stream_k", 16, 16, 32, options=(("num_sms", 70), ("share_more", 1)))
STREAM_ROUNDS = Config("stream_k", 16, 16, 32, options=(("num_sms", 70),))
STREAM_UNITS = Config("stream_k", 16, 16, 32)
C = "acc.to(c_ptr.dtype.element_ty)"
DOT = "acc = tl.dot(a, b, acc)\n"
ROW, COLUMN = "(row0 + rows == M - 1)[:, None]", "(col0 + cols == N - 1)[None, :]"


@dataclass(frozen=True)
class Edit:
    """A change of a kernel's text, wherever it stands there.

    Attributes:
        name: what is wrong then.
        old, new: the text and what takes its place.
        problem, config, target: where it spoils the result.
        status: of its trial.
        quick: the quick tests have it too.
    """

    name: str
    old: str
    new: str
    problem: Problem
    config: Config
    target: Target = GFX942
    status: str = "wrong"
    quick: bool = False


EDITS = (
    Edit("the last K block is skipped", "range(first, last)", "range(first, last - 1)", NARROW, PLAIN),
    Edit("runs of K are lost", "total += acc", "total = acc", NARROW, replace(PLAIN, options=(("runs", 3),))),
    Edit("negative values are too large", C, f"tl.where(acc < 0, acc * 1.1, acc){C[3:]}", NARROW, PLAIN),
    Edit("GROUP_M is not cut", "min(tiles_m - first_m, GROUP_M)", "GROUP_M", NARROW, replace(PLAIN, group_m=4)),
    Edit("the bias is ignored", "acc += bias_given.to(tl.float32)[None, :]", "acc += 0", NARROW, PLAIN),
    Edit("no mask along K", "< K - k * BLOCK_K", "< K", NARROW, PLAIN, status="crashed"),
    Edit("no mask along M", "rows < M - tile_m * BLOCK_M", "rows < M", NARROW, PLAIN, status="crashed"),
    Edit("the dies' order", "min(die, longer)", "0", NARROW, replace(PLAIN, options=(("xcds", 8),))),
    Edit(
        "integers wrap around", "tl.minimum(tl.maximum(acc, -128), 127)", "acc",
        Problem(48, 48, 64, *matrices("int8")), PLAIN,
    ),
    Edit(
        "uneven splits drop blocks", "tl.cdiv(blocks, SPLIT_K)", "blocks // SPLIT_K",
        replace(EVEN, k=160), FOUR_SPLITS, quick=True,
    ),
    Edit("a row of B's factors for all", "(tile_n * BLOCK_N // 128)", "(tile_n * 0)", BLOCKS, BLOCK_TILE),
    Edit("factors of another block", "tl.minimum(k + 1, ", "tl.minimum(k + 2, ", BLOCKS, BLOCK_TILE),
    Edit("the last element", C, f"tl.where({ROW} & {COLUMN}, acc * 1.5, acc){C[3:]}", BLOCKS, BLOCK_TILE),
    Edit("sums in bf16", DOT, "acc = tl.dot(a, b, acc).to(tl.bfloat16).to(tl.float32)\n", NARROW, PLAIN, quick=True),
    Edit("stream-K's sums in bf16", DOT, "acc = tl.dot(a, b, acc).to(tl.bfloat16).to(tl.float32)\n", NARROW, STREAM),
    Edit(
        "sums of factors in bf16", "acc += tl.dot(a, b) * factors",
        "acc = (acc + tl.dot(a, b) * factors).to(tl.bfloat16).to(tl.float32)", BLOCKS, BLOCK_TILE,
    ),
    Edit(
        "counters are left", "tl.store(semaphore_ptr + pid, 0)", "pass", replace(EVEN, k=160), FOUR_SPLITS, quick=True
    ),
    Edit("stream-K's counters are left", "tl.store(semaphore_ptr + pid, 0)", "pass", NARROW, STREAM),
    Edit(
        "polled words are left", "tl.store(words + s * area, 0, mask=in_m[:, None])", "pass",
        replace(EVEN, k=160), POLLED,
    ),
    Edit(
        "the last split adds up", "if arrived == SPLIT_K - 1", "if split == SPLIT_K - 1",
        replace(EVEN, k=160), FOUR_SPLITS, quick=True,
    ),
    Edit(
        "the last run adds up", "if arrived + mine == blocks", "if last == blocks",
        NARROW, STREAM,
    ),
    Edit(
        "large inputs are cut", DOT, "acc = tl.dot(tl.where(a > 100.0, 100.0, a).to(tl.float16), b, acc)\n",
        NARROW, PLAIN, quick=True,
    ),
    Edit("NaN is hidden", C, f"tl.where(acc != acc, 0.0, acc){C[3:]}", NARROW, PLAIN, quick=True),
    Edit("infinity is cut", C, f"tl.minimum(acc, 3e38, propagate_nan=tl.PropagateNan.ALL){C[3:]}", NARROW, PLAIN),
    Edit(
        "NaN becomes the largest fp8", ", propagate_nan=tl.PropagateNan.ALL", "",
        Problem(48, 48, 64, *matrices(c="fp8e4m3fnuz")), PLAIN,
    ),
    Edit("gate and up exchanged", "gate, up = acc", "up, gate = acc", GATED, PLAIN),
    Edit(
        "another GELU", "0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))",
        "gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))", GATED, PLAIN,
    ),
    Edit(
        "numbers beyond those of C's type", "axis=2) / 448", "axis=2) / 896",
        IN_BLOCKS, Config("tile", 16, 256, 32), SM90, quick=True,
    ),
    Edit("one round of tiles", ", tiles, tl.num_programs(0), ", ", tl.num_programs(0), tl.num_programs(0), ",
         EVEN, PERSISTENT, replace(SM90, compute_units=32)),
    Edit("half a tile twice", "right.to(c_desc.dtype)", "left.to(c_desc.dtype)", EVEN, PERSISTENT, SM90),
    Edit("one round of full tiles", "(step - parts) * programs + p", "p", NARROW, STREAM_ROUNDS),
    Edit("one slot for two parts", "2 * p + (pid != first_shared).to(tl.int32)", "2 * p", NARROW, STREAM),
    Edit("a slot beyond the last", "slot.to(", "(slot + 2).to(", NARROW, STREAM_UNITS, SM90, "crashed"),
    Edit("one product's B for all", "product * batch_b", "product * 0", replace(EVEN, batch=4), PLAIN),
    Edit(
        "one round of groups' tiles", "tl.range(pid, tiles, tl.num_programs(0))", 
        "tl.range(pid, tl.num_programs(0), tl.num_programs(0))", GROUPS, GROUPED, replace(GFX942, compute_units=8),
    ),
    Edit("rows of the next group", "rows < rows_in_group - tile_m * BLOCK_M", "rows < M - row0", GROUPS, GROUPED),
    Edit("the first group's B for all", "b_base += group.to(tl.int64) * N * K", "pass", GROUPS, GROUPED),
)  # fmt: skip


def check(problem: Problem, config: Config, target: Target) -> Trial:
    with closing(OfflineEvaluator(target, 60.0)) as evaluator:
        (trial,) = evaluator.verify(problem, [Artifact(config, "")])
    return trial


@apart(*[pytest.param(e, id=e.name, marks=() if e.quick else pytest.mark.heavy) for e in EDITS])
def test_a_wrong_kernel_is_noticed(edit: Edit, /, monkeypatch: Patch) -> None:
    triton = registry.get(SearchedBackend, "triton")
    write = triton.write_candidates

    def edited(problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
        path: Path = write(problem, configs, target, folder)
        text = path.read_text()
        assert edit.old in text
        path.write_text(text.replace(edit.old, edit.new))
        return path

    monkeypatch.setattr(triton, "write_candidates", edited)
    trial = check(edit.problem, edit.config, edit.target)
    assert trial.status == edit.status and ("SIGSEGV" in trial.reason) is (edit.status == "crashed"), trial


@pytest.mark.heavy
def test_what_the_edits_change_is_right() -> None:
    """Otherwise the edits prove nothing."""
    for problem, config, target in dict.fromkeys((e.problem, e.config, e.target) for e in EDITS):
        trial = check(problem, config, target)
        assert trial.status == "ok", trial


@pytest.mark.heavy
def test_many_tiles(interpreter: WorkerProcess, tmp_path: Path) -> None:
    """More than 500, which a check at a reduced size has not."""
    problem, config = Problem(23 * 16, 23 * 16 - 3, 16, *matrices()), replace(SPLIT, block_n=16, split_k=1)
    text = modules.write_candidates(problem, [config], GFX942, tmp_path).read_text()
    ((error, tolerance),) = interpreter.ask(InterpreterJob(problem, config, text), 60)
    assert error <= tolerance
    old, new = "col0 = (tile_n * BLOCK_N).to(tl.int64)", "col0 = (tile_n * (pid < 500) * BLOCK_N).to(tl.int64)"
    assert old in text
    ((error, _),) = interpreter.ask(InterpreterJob(problem, config, text.replace(old, new)), 60)
    assert error > tolerance
