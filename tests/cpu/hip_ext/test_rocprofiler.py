"""The rocprofiler-sdk binding: layouts against the SDK's header, the life cycle against a stand-in of both versions."""

import atexit
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from tests.support.nouns import UnavailableError, fails
from tests.support.timers import poke, stand_in, traced
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import symbols
from tritongemm.hip_ext.profilers import rocprofiler
from tritongemm.hip_ext.profilers.rocprofiler import ConfigurationLockedError, RocprofilerTracer
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError

INCLUDE = Path(triton.__file__).parent / "backends/amd/include"

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
    pytest.mark.skipif(not (INCLUDE / "rocprofiler-sdk").is_dir(), reason="this triton wheel has no SDK headers"),
]

SYMBOL = "rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t"
CALLBACK = "rocprofiler_callback_tracing_record_t"
DISPATCH = "rocprofiler_buffer_tracing_kernel_dispatch_record_t"
INFO = "rocprofiler_kernel_dispatch_info_t"


@pytest.fixture(params=["sdk0", "sdk1"])
def library(request: pytest.FixtureRequest, profilers: Path, tmp_path: Path) -> ctypes.CDLL:
    return stand_in(request.param, profilers, tmp_path)


@pytest.fixture
def tracer(library: ctypes.CDLL) -> RocprofilerTracer:
    return RocprofilerTracer(library)


def load(library: ctypes.CDLL, name: bytes, kernel: int, operation: int = 2, phase: int = 1) -> None:
    library.fake_load(name, kernel, operation, phase)


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    questions = {
        "sizeof(rocprofiler_tool_configure_result_t)": ctypes.sizeof(rocprofiler._ConfigureResult),
        "offsetof(rocprofiler_tool_configure_result_t, initialize)": rocprofiler._ConfigureResult.initialize.offset,
        "offsetof(rocprofiler_tool_configure_result_t, finalize)": rocprofiler._ConfigureResult.finalize.offset,
        "offsetof(rocprofiler_tool_configure_result_t, tool_data)": rocprofiler._ConfigureResult.data.offset,
        "offsetof(rocprofiler_client_id_t, name)": rocprofiler.LAYOUTS[1].client_name,
        f"sizeof({CALLBACK})": ctypes.sizeof(rocprofiler._CallbackRecord),
        f"offsetof({CALLBACK}, kind)": rocprofiler.LAYOUTS[1].kind,
        f"offsetof({CALLBACK}, operation)": rocprofiler.LAYOUTS[1].kind + 4,
        f"offsetof({CALLBACK}, phase)": rocprofiler.LAYOUTS[1].kind + 8,
        f"offsetof({CALLBACK}, payload)": rocprofiler.LAYOUTS[1].payload, f"offsetof({SYMBOL}, size)": 0,
        f"offsetof({SYMBOL}, kernel_id)": rocprofiler._SYMBOL_ID,
        f"offsetof({SYMBOL}, kernel_name)": rocprofiler._SYMBOL_NAME, "sizeof(rocprofiler_record_header_t)": 16,
        "offsetof(rocprofiler_record_header_t, kind)": 4, "offsetof(rocprofiler_record_header_t, payload)": 8,
        f"offsetof({DISPATCH}, start_timestamp)": rocprofiler._SPAN,
        f"offsetof({DISPATCH}, end_timestamp)": rocprofiler._SPAN + 8,
        f"offsetof({DISPATCH}, dispatch_info) + offsetof({INFO}, kernel_id)": rocprofiler._IDS,
        f"offsetof({DISPATCH}, dispatch_info) + offsetof({INFO}, dispatch_id)": rocprofiler._IDS + 8,
        "ROCPROFILER_CALLBACK_TRACING_CODE_OBJECT": rocprofiler._CODE_OBJECT,
        "ROCPROFILER_BUFFER_TRACING_KERNEL_DISPATCH": rocprofiler._KERNEL_DISPATCH,
        "ROCPROFILER_CODE_OBJECT_DEVICE_KERNEL_SYMBOL_REGISTER": rocprofiler._KERNEL_SYMBOL,
        "ROCPROFILER_CALLBACK_PHASE_LOAD": rocprofiler._LOAD,
        "ROCPROFILER_BUFFER_CATEGORY_TRACING": rocprofiler._TRACING,
        "ROCPROFILER_BUFFER_POLICY_LOSSLESS": rocprofiler._LOSSLESS,
        "ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED": 16,
    }  # fmt: skip
    headers = ["fwd.h", "buffer_tracing.h", "callback_tracing.h", "registration.h"]
    source = tmp_path / "layout.c"
    source.write_text(
        "#define __HIP_PLATFORM_AMD__\n#include <stddef.h>\n#include <stdio.h>\n"
        "typedef struct hipArrayMemoryRequirements hipArrayMemoryRequirements;\n"
        + "".join(f"#include <rocprofiler-sdk/{h}>\n" for h in headers)
        + "int main(void) {"
        + "".join(f'printf("%d\\n", (int)({q}));' for q in questions)
        + "return 0; }"
    )
    subprocess.run(["cc", "-w", f"-I{INCLUDE}", str(source), "-o", str(tmp_path / "layout")], check=True, timeout=60)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert dict(zip(questions, map(int, printed.split()), strict=True)) == questions


def test_the_life_of_a_process(library: ctypes.CDLL, tracer: RocprofilerTracer) -> None:
    assert tracer.version[0] == ctypes.c_int.in_dll(library, "fake_major").value
    assert (ctypes.c_char * 32).in_dll(library, "fake_client").value == b"tritongemm"
    load(library, b"gemm.kd", 3)
    load(library, b"reduce.kd", 4)
    load(library, b"gone.kd", 3, phase=2)  # an unload does not rename
    load(library, b"host", 3, operation=3)
    library.fake_launch(3, 1, 1500, 1600)  # nothing is recorded outside a trace
    for turn in range(3):
        with traced(tracer) as trace:
            library.fake_launch(4, 12, 3000 + turn, 3500)
            library.fake_launch(3, 11, 2000 + turn, 2600)
        records = trace.records(["gemm", "reduce"])
        assert records == [KernelRecord("gemm", 2000 + turn, 2600), KernelRecord("reduce", 3000 + turn, 3500)]
    stops = ctypes.c_int.in_dll(library, "fake_stops").value
    tracer.close()
    assert ctypes.c_int.in_dll(library, "fake_stops").value == stops + 2
    load(library, b"after.kd", 5)  # the SDK has no one left to call
    assert tracer._names == {3: "gemm", 4: "reduce"}


def test_malformed_records_and_kernels_without_names(library: ctypes.CDLL, tracer: RocprofilerTracer) -> None:
    load(library, b"a.kd", 1)
    with traced(tracer) as trace:
        library.fake_launch(1, 5, 2000, 2100)
        library.fake_launch(9, 6, 2200, 2300)
    fails(TraceError, "launch 1 was unseen, its record says nothing", trace.records, ["a", "unseen"], timeout=0.01)
    poke(library, "broken_size", 40)
    with traced(tracer) as trace:
        library.fake_launch(1, 1, 2000, 2100)
    fails(TraceError, "a dispatch record of 40 bytes", trace.records)


def test_dropped_records_spoil_their_trace_and_no_later_one(library: ctypes.CDLL, tracer: RocprofilerTracer) -> None:
    for dropped, message in ((2, "dropped 2 records"), (5, "dropped 3 records")):
        poke(library, "dropped", dropped)
        with traced(tracer) as trace:
            library.fake_launch(1, 1, 2000, 2100)
        fails(TraceError, message, trace.records, 1)
    with traced(tracer) as trace:  # the SDK's count never goes back
        library.fake_launch(1, 2, 2000, 2100)
    assert len(trace.records(1)) == 1


def test_locked_configuration_has_its_own_error(library: ctypes.CDLL) -> None:
    poke(library, "initialized", 1)
    fails(ConfigurationLockedError, "configured already: the GPU was used before", RocprofilerTracer, library)


@pytest.mark.parametrize("number", [15, 16])
def test_locked_is_known_by_name_whatever_its_number(library: ctypes.CDLL, number: int) -> None:
    poke(library, "initialized", -1)  # another tool is just being configured
    poke(library, "locked", number)
    with pytest.raises(ConfigurationLockedError, match=rf"force_configure failed: \w+_LOCKED \({number}\): in words"):
        RocprofilerTracer(library)


def test_one_process_registers_once(library: ctypes.CDLL, tracer: RocprofilerTracer) -> None:
    fails(ConfigurationLockedError, "", RocprofilerTracer, library)
    with traced(tracer) as trace:
        library.fake_launch(1, 1, 2000, 2100)
    assert len(trace.records(1)) == 1


def test_an_sdk_that_is_unknown_or_silent_is_unavailable(library: ctypes.CDLL) -> None:
    poke(library, "mute", 1)
    fails(UnavailableError, "did not call this process's tool back", RocprofilerTracer, library)
    poke(library, "major", 2)
    fails(UnavailableError, r"is version \(2, 5, 0\); known are 0.x and 1.x", RocprofilerTracer, library)


def test_configure_wants_hip_and_hsa_loaded_first(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    fails(UnavailableError, "HIP runtime", rocprofiler.configure.__wrapped__)
    monkeypatch.setattr(symbols, "bind", lambda vendor: None)
    fails(UnavailableError, "brought no libhsa-runtime64", rocprofiler.configure.__wrapped__)
    monkeypatch.setattr(libraries, "mapped", lambda stem: Path("/lib") / stem)
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    assert isinstance(rocprofiler.configure.__wrapped__(), RocprofilerTracer)
