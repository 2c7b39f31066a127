"""What kernels read and write is stored inside their operands, though splits of K or rows of tiles are left empty."""

from pathlib import Path

import pytest

from tests.support.interpreted import Interpreted
from tests.support.nouns import Config, Family, KernelBackend, Problem, fails, load_target, matrices, registry
from tritongemm.codegen import modules
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.system.child_process import WorkerDied, WorkerProcess

FP8 = ("fp8e4m3fn", "fp8e4m3fn", "bf16")
FP4 = ("fp4e2m1", "fp4e2m1", "bf16")
# The architecture, the family, dtypes, and the form of scales.
FORMS = (
    ("gfx942", "dense", ("bf16", "bf16", "bf16"), ""),
    ("sm90", "a8w8", ("int8", "int8", "bf16"), ""),
    ("sm90", "a8w8_blockscale", FP8, ""),
    ("sm90", "a8w8_blockscale", FP8, "group_rows"),
    ("sm90", "a4w4_blockscale", FP4, ""),
    ("sm90", "a4w4_blockscale", FP4, "mx"),
    ("sm100", "a8w8_blockscale", FP8, "mx_shuffled"),
    ("sm100", "a4w4_blockscale", FP4, ""),
)
# Of four blocks along K the third split has none; the last block may be a part of one.
SPLITS = (
    Config("tile", 16, 32, 128, split_k=3),
    Config("tile", 16, 32, 128, split_k=3, options=(("poll", 1), ("swap_ab", 1))),
    Config("gemv", 1, 16, 128, split_k=3),
    Config("tma", 16, 32, 128, split_k=3),
    Config("stream_k", 16, 32, 128, 2, options=(("num_sms", 7),)),
)


@pytest.mark.parametrize(
    ("arch", "family", "dtypes", "scales", "k", "some"),
    [
        pytest.param(
            *form, k, SPLITS[i % 2 :: 2] if quick else SPLITS, marks=() if quick else pytest.mark.heavy,
            id=f"{'-'.join(map(str, form))}-{k}{'-some' * quick}",
        )
        for i, form in enumerate(FORMS)
        for k, quick in ((512, False), (416, False), ((416, 512)[i % 2], True))
    ],
)  # fmt: skip
def test_a_split_without_blocks_reads_nothing_beyond(
    interpreted: Interpreted,
    arch: str,
    family: str,
    dtypes: tuple[str, str, str],
    scales: str,
    k: int,
    some: tuple[Config, ...],
) -> None:
    """One row of A, so that what is beyond its last number is beyond the operand."""
    operands = matrices(*dtypes, layout="TT" if family == "dense" else "TN")
    problem = registry.get(Family, family).problem(Problem(1, 32, k, *operands), scales)
    target, triton = load_target(arch), registry.get(KernelBackend, "triton")
    configs = [config for config in some if triton.check(config, problem, target)]
    assert "tile" in {config.template for config in configs}
    interpreted.check(problem, configs, target)


def test_a_kernel_that_reads_beyond_an_operand_ends_its_process(interpreter: WorkerProcess, tmp_path: Path) -> None:
    """Whatever is there: the result would be right."""
    config, target = Config("tile", 16, 32, 32), load_target("gfx942")
    problem = Problem(1, 32, 64, *matrices("bf16"))
    text = modules.write_candidates(problem, [config], target, tmp_path).read_text()
    ((error, tolerance),) = interpreter.ask(InterpreterJob(problem, config, text), 60)
    assert error <= tolerance
    start = "    split = tl.program_id(1)\n"
    assert text.count(start) == 1
    beyond = text.replace(start, f"{start}    tl.store(c_ptr + N - 1, tl.load(a_ptr + K))\n")
    fails(WorkerDied, "SIGSEGV", list, interpreter.ask(InterpreterJob(problem, config, beyond), 60))
