import atexit
import ctypes
import gc
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import triton

from tests.support import FAKES, emulated
from tests.support.interpreted import Interpreted
from tests.support.lent_processes import LentProcess
from tests.support.plugins import forget_plugins
from tests.support.racing import Drop
from tritongemm.build import pool
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver
from tritongemm.measure import offline_evaluator
from tritongemm.plugins import registry
from tritongemm.system.locks import locked
from tritongemm.tune import search_processes

# A busy machine is no failure. CI asks for the other with --hypothesis-profile.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile("quick")

# Files that share what takes seconds: torch.compile, and transformers, which imports it; the process that programs are
# forked from, and the package's parsed source.
COMPILED = ("contracts/test_traced_operations", "contracts/test_operation", "integrations/", "scenarios/test_epilogues",
            "scenarios/test_examples", "serving/test_joined_layers", "serving/test_layer_choice",
            "serving/test_operand_layouts", "serving/test_patch", "serving/test_serve", "workloads/test_meta_model",
            "workloads/capturing/test_capture")  # fmt: skip
FORKED = ("architecture/", "benchmarks/test_scripts", "codegen/test_render", "export/library/test_serving",
          "scenarios/test_screen", "scenarios/test_shuffled_b", "serving/test_api",
          "workloads/capturing/test_processes")  # fmt: skip
TOGETHER = {**dict.fromkeys(COMPILED, "compiled"), **dict.fromkeys(FORKED, "forked")}

# Files of few tests that take seconds: else they would come last, as those of many tests come first.
LONG = ("forked", "compiled", "tune/test_table_tuning", "backends/test_assembly_edits", "scenarios/test_warp_roles",
        "tune/test_search_processes", "numerics/test_mx", "cli/test_tune", "backends/test_triton",
        "numerics/test_a16w4", "scenarios/test_interpreted", "scenarios/test_grouped_kernels",
        "codegen/test_launched_modules", "scenarios/test_plugins", "scenarios/test_processes", "build/test_pool",
        "codegen/test_reduction_orders", "serving/test_device_kernels", "export/test_launch_plan",
        "measure/test_invariance", "scenarios/test_planted_modules", "scenarios/test_memory_bounds")  # fmt: skip

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # registered first, it is called last: to free a million objects takes seconds


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process, which makes what they share once; `--dist` may say otherwise."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid).removeprefix("tests/cpu/").removesuffix(".py")
            return next((TOGETHER[start] for start in TOGETHER if file.startswith(start)), file)

        def _assign_work_unit(self, node: Any) -> None:
            first = next((name for name in LONG if name in self.workqueue), None)
            if first:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection() -> None:
    """Has the garbage of imports wait: hardly anything of them is, and all is looked through again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spares each test what grows with all that was imported for the others."""
    gc.enable()
    gc.freeze()  # a collection looks through what tests make, and not through PyTorch
    gc.set_threshold(20_000)  # objects, as tests that parse files or rank configs make hundreds of thousands
    atexit.register(gc.unfreeze)  # not before: pytest collects several times when all tests are done


@pytest.fixture(scope="module", autouse=True)
def garbage_of_earlier_files() -> None:
    """What earlier files left is collected once, and what they keep, a million objects in the end, never looked at."""
    gc.collect()
    gc.freeze()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.name.startswith(("torch", "transformers")):
            logger.propagate = True  # pytest listens to each logger that does not, several times a test


def pytest_runtest_setup(item: pytest.Item) -> None:
    lacking = emulated.find() if item.get_closest_marker("emulator") else None
    if isinstance(lacking, str):
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def session_cache(shared_folder: Path) -> Iterator[Path]:
    """One cache of compiled kernels for the entire run, whatever its processes, and never the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = shared_folder / "compiled"
        folder.mkdir(exist_ok=True)
        patch.setenv("TRITONGEMM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def files_in_memory() -> Iterator[None]:
    """Nothing waits for the disk, which takes longer than most tests: their files need not outlive the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def lent_processes() -> Iterator[None]:
    """Compiler, interpreter and planning processes of a test go on to the next."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pool, offline_evaluator, search_processes):
            patch.setattr(module, "WorkerProcess", LentProcess)
        yield
        LentProcess.end()


@pytest.fixture
def interpreter(lent_processes: None) -> Iterator[LentProcess]:
    child = LentProcess("tritongemm.measure.interpreting:Interpreter", {"TRITON_INTERPRET": "1"})
    yield child
    child.kill()


@pytest.fixture
def interpreted(interpreter: LentProcess, tmp_path: Path) -> Interpreted:
    return Interpreted(interpreter, tmp_path)


def compile_once(folder: Path, commands: Mapping[str, Sequence[str]]) -> Path:
    """Have the first process of the run that comes compile libraries into a folder, and the others wait for it.

    The commands are those for each library's name, without where the compiler writes. The folder is there when all are.
    """
    with locked(Path(f"{folder}.lock"), f"{folder} is not compiled", "run the test again", seconds=600):
        if not folder.exists():
            new = folder.with_name(f"{folder.name}_{os.getpid()}")
            new.mkdir()
            for name, command in commands.items():
                subprocess.run([*command, "-o", str(new / name)], check=True, timeout=120)
            new.rename(folder)
    return folder


@pytest.fixture(scope="session")
def driver_libraries(shared_folder: Path) -> Path:
    """Folder of a stand-in for each vendor's driver, compiled from that vendor's real header."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    headers, commands = Path(triton.__file__).parent / "backends", {}
    for vendor, define in (("nvidia", "-DNVIDIA"), ("amd", "-DAMD")):
        options = ["-O1", "-shared", "-fPIC", define, f"-I{headers / vendor / 'include'}"]
        commands[f"{vendor}.so"] = ["cc", *options, str(FAKES / "driver.c")]
    return compile_once(shared_folder / "drivers", commands)


@pytest.fixture(scope="session")
def blaslt_libraries(shared_folder: Path) -> Path:
    """Folder of the stand-ins of cuBLASLt and hipBLASLt; who loads one makes a copy, whose state starts anew."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", str(FAKES / "blaslt.cpp")]
    return compile_once(shared_folder / "blaslt", {"nvidia.so": command, "amd.so": [*command, "-DAMD"]})


@pytest.fixture(scope="session")
def profilers(shared_folder: Path) -> Path:
    """Folder of the stand-ins of profilers; `tests.support.timers.stand_in` loads one."""
    from tests.support.timers import compilers

    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return compile_once(shared_folder / "profilers", compilers())


@pytest.fixture
def stand_in_driver(
    driver_libraries: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], tuple[ctypes.CDLL, driver.Driver]]:
    """Starts the stand-in of a vendor: (its own variables, the driver)."""

    def start(vendor: str) -> tuple[ctypes.CDLL, driver.Driver]:
        copy = shutil.copy(driver_libraries / f"{vendor}.so", tmp_path / f"{vendor}.so")  # its state starts anew
        library = ctypes.CDLL(str(copy))
        monkeypatch.setattr(libraries, "load", lambda *_: library)
        return library, driver.open_driver.__wrapped__(vendor)

    return start


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts a backend beside those that are there; names begin with ``toy``."""
    package = importlib.import_module("tritongemm.backends")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    def add(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        forget_plugins(tmp_path)

    yield add
    registry.forget()
    for name in [n for n in sys.modules if n.startswith("tritongemm.backends.toy")]:
        del sys.modules[name]
        vars(package).pop(name.rpartition(".")[2], None)


@pytest.fixture(scope="module")
def without_gpu() -> Iterator[None]:
    """A machine without one, for this process and those it starts, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "find_vendor", lambda: None)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("HIP_VISIBLE_DEVICES", "")
        yield
