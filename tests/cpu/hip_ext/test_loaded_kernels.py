"""Where a served kernel's parameters hold the addresses that it is given."""

from tests.cpu.hip_ext.test_zeroed_launch import FunctionStub, Recorder
from tritongemm.core.launch import Launch, Param
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel


class DeviceOfMaps(Recorder):
    """A device whose tensor maps hold the address in their second word."""

    def tensor_map(self, address: int, *_: object) -> bytes:
        return bytes(8) + address.to_bytes(8, "little") + bytes(112)


def test_c_is_reported_as_a_map_and_as_a_pointer() -> None:
    """A kernel may store full tiles by a map, and rows of others by a pointer; a missing bias is not read."""
    described = Param("tma", "c", elem_type=1, elem_size=2, shape=(64, 64), stride=64, box=(64, 64))
    pointers = [Param("pointer", name) for name in ("c", "scale_a", "c", "workspace")]
    launch = Launch("k.co", "k", (1, 1, 1), (128, 1, 1), 0, (described, *pointers), ())
    device = DeviceOfMaps()
    given: list[bytearray] = []

    class Function(FunctionStub):
        def prepare(self, *arguments: object, **more: object):  # type: ignore[no-untyped-def]
            prepared = super().prepare(*arguments, **more)
            given.append(prepared.params)
            return prepared

    prepared = TunedKernel(launch, Function(device)).prepare(device)  # type: ignore[arg-type]
    prepared.set_address("c")(0x4000)
    prepared.set_address("scale_a")(0x5000)
    words = [int.from_bytes(given[0][at : at + 8], "little") for at in range(0, len(given[0]), 8)]
    assert words[1] == 0x4000 and words[16:] == [0x4000, 0x5000, 0, 0]
