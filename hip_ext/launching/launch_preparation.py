"""Prepares a `Launch` with a loaded function: the only place that encodes tensor maps and packs parameters."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from tritongemm.core.launch import Launch, Param
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.module import PreparedLaunch

PLACEHOLDER_ADDRESS = 1 << 20  # a tensor map needs an aligned address until it gets its own

TensorMapMaker: TypeAlias = Callable[[int], bytes]  # the tensor map of a matrix at an address


def tensor_map_makers(device: driver.Device, launch: Launch) -> dict[int, TensorMapMaker]:
    """Return the maker of each tensor map among a launch's parameters, by the index of the parameter."""
    return {index: _maker(device, param) for index, param in enumerate(launch.params) if param.kind == "tma"}


def _maker(device: driver.Device, p: Param) -> TensorMapMaker:
    return lambda address: device.tensor_map(address, p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle)


def prepare_launch(
    function: driver.Function,
    launch: Launch,
    makers: Mapping[int, TensorMapMaker],
    addresses: Mapping[str, int] | None = None,
) -> PreparedLaunch:
    """Return a launch with everything but the stream fixed.

    Args:
        function: the loaded kernel.
        launch: its grid, block and parameters.
        makers: its `tensor_map_makers`.
        addresses: device address of each buffer by name. None where they are written into the parameters later: until
            then pointers are null and tensor maps are at `PLACEHOLDER_ADDRESS`, and where there are such maps the
            driver gets the offset of each parameter.
    """
    if addresses is None:
        packed = launch.pack({}, {index: make(PLACEHOLDER_ADDRESS) for index, make in makers.items()})
        offsets = tuple(launch.offsets()) if makers else ()
    else:
        maps = {index: make(addresses[str(launch.params[index].value)]) for index, make in makers.items()}
        packed, offsets = launch.pack(addresses, maps), ()
    return function.prepare(launch.grid, launch.block, launch.shared, packed, launch.cluster, offsets, launch.overlap)
