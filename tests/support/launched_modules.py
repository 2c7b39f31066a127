"""Launches of a generated module's kernels by Triton's own launcher, for a GPU that is not here: nothing is started.

Triton's launcher makes a constant of an argument that is 1 and notes which are multiples of 16, which this
package leaves out of its own compiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tritongemm.backends.triton.compiling import GPU_TARGETS
from tritongemm.codegen import modules as generated
from tritongemm.core.target import Target


class _StandInDriver:
    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def launches_for(target: Target, folder: Path, binary: bool = False) -> Iterator[list[str]]:
    """Have launches of any kernel compile for a target; yields a list that each adds its kernel's text to.

    Args:
        target: the GPU's architecture.
        folder: of Triton's cache.
        binary: compile to the end; otherwise to the first form in which kernels are checked, inlined and simplified.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler
    from triton.runtime import jit

    generated.run_text.cache_clear()  # kernels of modules that were run before would not be compiled again
    made: list[str] = []
    entire = compiler.compile

    def compile_text(source: Any, target: Any, options: dict[str, Any]) -> str:
        if binary:
            made.append(entire(source, target=target, options=options).asm["ttgir"])
            return made[-1]
        backend = compiler.make_backend(target)
        parsed = backend.parse_options(dict(options, **source.parse_options()))
        context = compiler.ir.context()
        compiler.ir.load_dialects(context)
        backend.load_dialects(context)
        codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        text = source.make_ir(target, parsed, codegen, modules, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, source.language)
        for name, lower in list(stages.items())[list(stages).index(source.ext) :]:
            text = lower(text, {"target": target, **vars(parsed)})
            if name in ("ttir", "ttgir"):
                break
        made.append(text.str_nodebug())
        return made[-1]

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    gpu = GPUTarget(*GPU_TARGETS[target.vendor](target.name), target.wave_size)
    with pytest.MonkeyPatch.context() as patch, triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        patch.setattr(triton.runtime.driver, "_active", _StandInDriver(gpu))
        patch.setattr(triton.compiler, "compile", compile_text)
        patch.setattr(jit.KernelInterface, "__getitem__", launch)
        yield made
