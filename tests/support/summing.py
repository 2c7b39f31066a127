"""A process in which kernels of Triton's interpreter add up numbers whose order of additions shows in the sum."""

from collections.abc import Iterator
from typing import Any

from tests.support import quick_interpreter
from tritongemm.measure.interpreting import InterpreterJob, mend_interpreter

STEP = 64  # elements of K with one number that is not 0: a block of at most as many is added up without rounding


RANKS_ROLE = "tests.support.summing:Ranks"
DEPTH = 16 * STEP  # elements of K that all ranks have together


class Ranks:
    """Answers an `InterpreterJob` of one rank's share of K with the bytes of a row that all ranks' sums add up to."""

    def __init__(self) -> None:
        mend_interpreter()
        quick_interpreter.hasten()

    def __call__(self, job: InterpreterJob) -> Iterator[bytes]:
        """Yield the first row, after the ranks' float32 sums were added pairwise."""
        import torch

        from tritongemm.codegen import modules

        module, m, n, share = modules.run_text(job.text, "generated"), job.problem.m, job.problem.n, job.problem.k
        generator = torch.Generator().manual_seed(3)
        a, b = torch.randn(m, DEPTH, generator=generator), torch.randn(n, DEPTH, generator=generator)
        sums = [torch.zeros(m, n) for _ in range(DEPTH // share)]
        for rank, c in enumerate(sums):
            part = slice(rank * share, (rank + 1) * share)
            operands: dict[str, Any] = {"a": a[:, part].contiguous(), "b": b[:, part].contiguous().t()}
            module.launch(job.config.name, c=c, **operands)
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        yield sums[0][0].numpy().tobytes()


class SumJob(InterpreterJob):
    """A request for the bytes of C's first row."""


def first_row(job: SumJob) -> Iterator[bytes]:
    """Yield the first row, of which each element is the sum of other numbers."""
    import torch

    from tritongemm.codegen import modules

    module = modules.run_text(job.text, "generated")
    problem, place = job.problem, torch.arange(job.problem.k // STEP)
    numbers = ((place * 7919) % 1021 - 500) * 2.0 ** ((place * 5) % 23)
    a = torch.zeros(problem.m, problem.k)
    a[:, place * STEP + place * 11 % STEP] = numbers
    columns = torch.arange(problem.n)[:, None]
    b = 2.0 ** ((columns * 5 + torch.arange(problem.k)[None, :] // STEP * columns) % 13)
    operands: dict[str, Any] = {"a": a, "b": b.t()}
    c = torch.zeros(problem.m, problem.n)
    module.launch(job.config.name, c=c, **operands)
    yield c[0].numpy().tobytes()
