from collections import Counter

import hypothesis
from hypothesis import strategies as st

from tests.support.call_logs import extended, line, trace
from tests.support.plugins import each_with_toy
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogContents, LoggedCall

TOY = "call_log_toy"
# A line of each kind as its library writes it.
SAMPLES = {
    "hipblaslt_profile": [line(), line(n=113, count=7, bias="true"), extended(n=113, count=3)],
    "rocblas_profile": [line("rocblas", count=136), line("rocblas", trans_a="N", a="f16_r", d="f32_r")],
    "bench_commands": [line("bench"), line("bench", batch=3, activation="gelu"), line("rocblas_bench", trans_a="N")],
    "matmul_trace": [trace(), trace(compute="transa=OP_T epilogue=EPILOGUE_BIAS biasPointer=0x7f ")],
    TOY: ["toy 16 32 64 x 5;\n", "toy 1 2 3 x 45;\n"],
}
NOISE = "2026-05-04 INFO {loaded: 3} shards, memory - 12 GB\n"


log = each_with_toy(CallLog, TOY)


def counted(contents: LogContents) -> Counter[LoggedCall]:
    found: Counter[LoggedCall] = Counter()
    for row in contents.rows:
        found[row.call] += int(row.count)
    return found


def test_it_reads_its_own_lines_as_calls(log: CallLog) -> None:
    own = SAMPLES[log.name]
    others = [text for name, texts in SAMPLES.items() if name != log.name for text in texts]
    contents = log.read(NOISE.join([*own, *others]))
    assert [row.line for row in contents.rows] == [1 + 2 * place for place in range(len(own))]
    assert not contents.faults and not contents.others and log.title and not log.read(NOISE.join(others)).rows
    first = SAMPLES[log.name][0]
    contents = log.read(first + first)
    assert len(contents.rows) == 2 and len({row.call for row in contents.rows}) == 1


@hypothesis.given(share=st.floats(0, 1))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_cut_line_is_never_another_call(log: CallLog, share: float) -> None:
    """A file that ends anywhere has no call that the complete one has not, and says which line is cut."""
    text = "".join(SAMPLES[log.name])
    entire = counted(log.read(text))
    cut = text[: round(share * len(text))]
    contents = log.read(cut)
    assert counted(contents) <= entire
    reported = len(contents.rows) + len(contents.faults)
    assert cut.count("\n") <= reported <= cut.count("\n") + 1


@hypothesis.given(share=st.floats(0, 1))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_line_in_another_one_is_read(log: CallLog, share: float) -> None:
    """Two processes that write into one file cut each other's lines."""
    if log.name == TOY:
        return
    first, second = SAMPLES[log.name][:2]
    place = round(share * (len(first) - 1))
    contents = log.read(first[:place] + second + first[place:])
    assert counted(contents) <= counted(log.read(first + second))
    assert counted(log.read(second)) <= counted(contents) or contents.faults
