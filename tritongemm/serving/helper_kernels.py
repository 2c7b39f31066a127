"""Kernels beside the products on a GPU: those of libraries, and others compiled where the cache lacks them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Launch
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.core.target import Target
from tritongemm.export.library.storage import KernelLibrary
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.stored_kernels import LoadedCode
from tritongemm.system import settings

_LOG = logging.getLogger("tritongemm")
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


@dataclass
class HelperKernels:
    """The kernels beside the products that one GPU can launch; of its libraries the latest is the last."""

    device: ServingDevice
    libraries: Sequence[KernelLibrary] = ()
    loaded: LoadedCode = field(default_factory=LoadedCode)
    _kernels: dict[str, TunedKernel] = field(default_factory=dict, init=False)

    @cached_property
    def target(self) -> Target:
        """Facts of the GPU's architecture, by a library or by the files of search_spaces.

        Raises:
            UnavailableError: no library has them, and nothing reads the files here.
        """
        arch = self.device.arch
        for library in reversed(self.libraries):
            if arch in library.targets:
                return library.targets[arch]
        try:
            from tritongemm.search_spaces import loader  # which reads YAML
        except ImportError as error:
            advice = "build the library with this version, or install PyYAML"
            raise UnavailableError(
                f"no library that is loaded has the facts of {arch}, and {error}; {advice}"
            ) from None
        return loader.load_target(arch)

    def prepare(self, helper: HelperKernel, arguments: HelperArguments) -> PatchedLaunch:
        """Return a launch for one thread.

        Raises:
            UnavailableError: no library has the kernel, and it can't be compiled here; or it would have to be loaded
                while a graph is captured.
            InputError: it can't be compiled, or launched so.
            DriverError: it can't be loaded.
        """
        with torch.cuda.device(self.device.index):
            self.device.driver_device.make_current()
            kernel = self._kernel(helper, arguments)
            launch = arguments.given_to(kernel.launch, helper)
            if fault := launch.fault(self.target):
                raise InputError(f"{helper.name} can't be launched on {self.target.name}: {fault}")
            return TunedKernel(launch, kernel.function).prepare(self.device.driver_device)

    def _kernel(self, helper: HelperKernel, arguments: HelperArguments) -> TunedKernel:
        """Return the loaded kernel, with a launch of any grid and numbers."""
        digest = helper.digest(self.device.arch)
        if digest not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise UnavailableError(f"{helper.name} is loaded by its first call, not while a graph is captured")
            with self.loaded.lock:
                if digest not in self._kernels:
                    found = self._load_stored(helper, digest) or self._load_compiled(helper, arguments)
                    self._kernels[digest] = found
        return self._kernels[digest]

    def _load_stored(self, helper: HelperKernel, digest: str) -> TunedKernel | None:
        """Return the kernel of a library; None where none has it undamaged."""
        for library in reversed(self.libraries):
            stored = library.helpers.get((self.device.arch, digest))
            if stored is None:
                continue
            try:
                return self._loaded(stored.launch, library.read_code(stored))
            except InputError as error:
                _LOG.warning("%s is not taken from a library: %s", helper.name, error)
        return None

    def _load_compiled(self, helper: HelperKernel, arguments: HelperArguments) -> TunedKernel:
        held = f"no library that is loaded has {helper} for {self.device.arch}"
        try:
            from tritongemm.build import helpers
            from tritongemm.build.cache import ArtifactCache

            artifact = helpers.compile_helper(helper, self.target, ArtifactCache(settings.cache_folder()))
            launch = helpers.launch_helper(artifact, helper, arguments, self.target)
        except (UnavailableError, ImportError) as error:
            raise UnavailableError(f"{held}, and it can't be compiled here: {error}") from None
        return self._loaded(launch, launch.read_code())

    def _loaded(self, launch: Launch, code: bytes) -> TunedKernel:
        return TunedKernel(launch, self.loaded.function(self.device, code, launch))


class HelperCall:
    """A kernel beside the products, made ready for one thread of a GPU."""

    __slots__ = ("_index", "_launch", "_setters")

    def __init__(self, prepared: PatchedLaunch, index: int) -> None:
        self._setters, self._launch, self._index = prepared.setters, prepared.launch, index

    def __call__(self, operands: Mapping[str, Tensor]) -> None:
        """Launch on operands by their names, in order of the current stream of the GPU, which is the current device."""
        for name, tensor in operands.items():
            self._setters[name](tensor.data_ptr())
        self._launch(_stream(self._index))
