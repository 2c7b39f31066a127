"""The CUPTI binding and the checks every trace goes through, against a stand-in built from the real header."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from tests.support.refusals import fails
from tests.support.timers import poke, stand_in, traced
from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.profilers import cupti
from tritongemm.hip_ext.profilers.trace import KernelRecord

INCLUDE = Path(triton.__file__).parent / "backends/nvidia/include"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def library(profilers: Path, tmp_path: Path) -> ctypes.CDLL:
    return stand_in("cupti", profilers, tmp_path)


@pytest.fixture
def tracer(library: ctypes.CDLL) -> cupti.CuptiTracer:
    return cupti.CuptiTracer(library)


def test_traces_have_memory_operations_and_more_than_a_buffer(library: ctypes.CDLL, tracer: cupti.CuptiTracer) -> None:
    library.fake_memset(500, 600, 1)
    with traced(tracer) as trace:
        library.fake_launch(b"gemm", 3000, 3500, 9)
        library.fake_memset(2000, 2100, 8)
        library.fake_memcpy(4000, 4100, 10)
    assert trace.records(["memset", "gemm", "memcpy"])[2] == KernelRecord("memcpy", 4000, 4100)
    with traced(tracer) as trace:
        for index in range(20_000):
            if index % 4000 == 3999:
                tracer.flush()
            library.fake_launch(b"k", 2000 + index, 2001 + index, index)
    assert [r.start_ns for r in trace.records(20_000)] == list(range(2000, 22_000))


def test_each_trace_has_its_own_records(library: ctypes.CDLL, tracer: cupti.CuptiTracer) -> None:
    for turn in range(3):
        library.fake_launch(b"between", 1500, 1600, 1)  # it goes on watching, but the next trace has none of it
        with traced(tracer) as trace:
            library.fake_launch(b"inside", 2000 + turn, 2100, 2)
        library.fake_launch(b"after", 2_000_000, 2_000_001, 3)
        tracer.flush()
        assert [r.start_ns for r in trace.records(1)] == [2000 + turn]
    tracer.disable()
    library.fake_launch(b"unseen", 2000, 2100, 1)
    tracer.flush()
    with traced(tracer) as trace:  # which enables it again
        library.fake_launch(b"inside", 2200, 2300, 1)
    assert [r.name for r in trace.records(1)] == ["inside"]


def test_a_profiler_that_is_refused_is_refused_each_time(library: ctypes.CDLL, tracer: cupti.CuptiTracer) -> None:
    poke(library, "refuse", 1)
    for _ in range(2):
        fails(DriverError, "cuptiActivityEnable", tracer.enable)
    poke(library, "refuse", 0)
    with traced(tracer) as trace:
        library.fake_launch(b"inside", 2200, 2300, 1)
    assert len(trace.records(1)) == 1


def test_what_cannot_be_used_is_unavailable(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(api=SimpleNamespace(keeps_code=False))
    monkeypatch.setattr(driver, "open_driver", lambda vendor: opened)
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    poke(library, "refuse", 1)
    with pytest.raises(
        UnavailableError, match=r"can't be used here: cuptiActivityRegisterCallbacks failed: CUPTI_ERROR"
    ):
        cupti.open_tracer.__wrapped__()
    poke(library, "version", 12)
    fails(UnavailableError, "speaks version 12; 13 is the oldest", cupti.open_tracer.__wrapped__)
    assert not opened.api.keeps_code, "nothing takes names"


def test_code_stays_from_the_registration_on(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(api=SimpleNamespace(keeps_code=False))
    monkeypatch.setattr(driver, "open_driver", lambda vendor: opened)
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    cupti.open_tracer.__wrapped__()
    assert opened.api.keeps_code


def test_offsets_are_those_of_every_struct_version(tmp_path: Path) -> None:
    """Records of API versions 12 to 26: one prefix for all of a kind."""
    fields = ["kind", "start", "end", "correlationId"]
    kernels = [(f"CUpti_ActivityKernel{v}", [*fields, "name"]) for v in range(4, 10)]
    memory = [(f"CUpti_Activity{name}", fields) for name in ("Memset", "Memset4", "Memcpy", "Memcpy6")]
    lines = "".join(
        f'printf("%zu ", offsetof({struct}, {field}));' for struct, wanted in kernels + memory for field in wanted
    )
    source = tmp_path / "offsets.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <cupti.h>\n#include <cupti_activity_deprecated.h>\n"
        f"int main(void) {{ {lines} return 0; }}"
    )
    subprocess.run(["cc", f"-I{INCLUDE}", str(source), "-o", str(tmp_path / "offsets")], check=True, timeout=60)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True, timeout=60).stdout
    span = [cupti._KIND, cupti._SPAN, cupti._SPAN + 8]
    expected = len(kernels) * [*span, cupti._CORRELATION, cupti._NAME]
    assert list(map(int, printed.split())) == expected + len(memory) * [*span, cupti._MEMORY_CORRELATION]
