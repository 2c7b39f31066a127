"""Launches that add into memory: it is set to zero before, on the same stream, wherever it is stored."""

from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.hip_ext.launching.patched_launch import ZeroedLaunch


class Recorder:
    """A device that keeps what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        self.calls.append(("fill", address, byte, nbytes, stream))


def test_memory_is_filled_before_each_launch() -> None:
    device = Recorder()
    launch = ZeroedLaunch(device, (Buffer("c", 96),), lambda stream: device.calls.append(("launch", stream)))
    launch.set_address("c", 0x1000)
    launch(7)
    launch.set_address("c", 0x2000)
    launch(8)
    assert device.calls == [("fill", 0x1000, 0, 96, 7), ("launch", 7), ("fill", 0x2000, 0, 96, 8), ("launch", 8)]


class PreparedStub:
    """A prepared launch of a driver that is not there."""

    def __init__(self, params: bytes, device: Recorder) -> None:
        self.params, self._device = bytearray(params), device

    def launch(self, stream: int) -> None:
        self._device.calls.append(("launch", int.from_bytes(self.params[:8], "little"), stream))


class FunctionStub:
    """A loaded function of a driver that is not there."""

    def __init__(self, device: Recorder) -> None:
        self._device = device

    def prepare(self, *arguments: object, **_: object) -> PreparedStub:
        (params,) = (a for a in arguments if isinstance(a, bytes))
        return PreparedStub(params, self._device)


def test_a_served_kernel_clears_the_c_that_it_is_given() -> None:
    device = Recorder()
    plain = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (Param("pointer", "c"),), ())
    for launch in (plain, Launch(**{**plain.__dict__, "zeroed": (Buffer("c", 32),)})):
        prepared = TunedKernel(launch, FunctionStub(device)).prepare(device)  # type: ignore[arg-type]
        prepared.set_address("c")(0x4000)
        prepared.launch(3)
    assert device.calls == [("launch", 0x4000, 3), ("fill", 0x4000, 0, 32, 3), ("launch", 0x4000, 3)]


def test_a_measured_launch_clears_the_c_of_its_own_operands() -> None:
    """In each set of operands; a fill may be a dispatch too, so no symbol of one kernel is promised to the clock."""
    from types import SimpleNamespace

    from tritongemm.measure.operand_sets import OperandSets

    device = Recorder()
    sets = SimpleNamespace(device=device)
    launch = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (Param("pointer", "c"),), (), zeroed=(Buffer("c", 48),))

    def run(stream: int) -> None:
        device.calls.append(("launch", stream))

    for place in (0x1000, 0x2000):
        OperandSets._zeroed(sets, launch, {"c": place}, run)(5)  # type: ignore[arg-type]
    assert device.calls == [("fill", 0x1000, 0, 48, 5), ("launch", 5), ("fill", 0x2000, 0, 48, 5), ("launch", 5)]
