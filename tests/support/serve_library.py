"""Serves a library where nothing that compiles can be imported; a GPU that stands in multiplies on the CPU.

Prints what was served. Called with the library's path.
"""

import ctypes
import importlib.util
import struct
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.linear_layers import HostDriver

REFUSED = ("triton", "jinja2", "joblib", "yaml", "rich")


class RefusingFinder(MetaPathFinder):
    """Finds no package that only tuning needs, nor lets `importlib.util.find_spec` see it, by which PyTorch asks."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def install(self) -> None:
        """Stands before the interpreter's own finders for as long as the process lives."""
        ask = importlib.util.find_spec

        def look(name: str, package: str | None = None) -> ModuleSpec | None:
            return None if name.partition(".")[0] in REFUSED else ask(name, package)

        sys.meta_path.insert(0, self)
        importlib.util.find_spec = look


class HostFunction:
    attributes: dict[str, int] = {}  # noqa: RUF012
    params: bytearray

    def prepare(self, *arguments: Any) -> "HostFunction":
        """A launch of its own, as a function may have several."""
        prepared = HostFunction()
        prepared.params = bytearray(arguments[3])
        return prepared

    def described(self) -> None:
        raise ValueError("Python computes it")

    refuse = None

    def launch(self, stream: int) -> None:
        import numpy as np

        *addresses, m, n, k = struct.unpack("<3Q3i", self.params)
        sizes = zip(addresses, (m * k, k * n, m * n), strict=True)
        a, b, c = (np.ctypeslib.as_array((ctypes.c_float * count).from_address(at)) for at, count in sizes)
        c[:] = (a.reshape(m, k) @ b.reshape(n, k).T).ravel()


def stand_in(patch: Any) -> "HostDriver":
    """Have the CPU stand in for a machine's one GPU, an sm90 of 132 compute units; its driver."""
    from tests.support import linear_layers
    from tritongemm.serving import kernel_loading

    host = linear_layers.HostDriver()
    device: Any = linear_layers.stand_in_device(driver_device=host)
    patch.setattr(kernel_loading, "open_device", lambda index, workspaces: device)
    patch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: "tf32")
    linear_layers.be_a_gpu(patch)
    return host


def main(path: str) -> None:
    RefusingFinder().install()
    import pytest
    import torch

    import tritongemm

    host = stand_in(pytest.MonkeyPatch())
    print("rows", int(tritongemm.load(path)))
    for m in (3, 16, 40):
        x, w = torch.randn(m, 64), torch.randn(48, 64)
        torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T)
        print(tritongemm.explain(x, w).splitlines()[0])
    print("loaded", len(host.loaded))
    print("imported", sorted(name for name in REFUSED if name in sys.modules))


if __name__ == "__main__":
    main(sys.argv[1])
