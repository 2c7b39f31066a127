"""Numbers that no launch can have are refused where a launch is made, not where it is packed or started."""

from dataclasses import replace

import pytest

from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch, Param
from tritongemm.search_spaces import loader

GFX942, SM90 = (loader.load_target(name) for name in ("gfx942", "sm90"))
LAUNCH = Launch("k.co", "k", (7, 2, 1), (256, 1, 1), 65536, (Param("i32", 2**31 - 1), Param("u32", 2**32 - 1)), ())


@each(("kind", "value"), [("i32", 2**31), ("i32", 99999999999), ("u32", -1), ("u32", 2**32), ("i64", 2**63)])
def test_a_parameter_fits_its_type(kind: str, value: int) -> None:
    with pytest.raises(InputError, match=f"a parameter of type {kind} can't be {value}: it holds "):
        Param(kind, value)


@each(
    ("change", "fault"),
    [
        ({"grid": (2**31, 1, 1)}, "2147483648 workgroups along x, of which a launch has 1 to 2147483647"),
        ({"grid": (1, 65536, 1)}, "65536 workgroups along y, of which a launch has 1 to 65535"),
        ({"grid": (1, 1, 0)}, "0 workgroups along z"),
        ({"block": (512, 4, 1)}, "2048 threads in a workgroup, which has 1 to 1024"),
        ({"block": (0, 1, 1)}, "0 threads in a workgroup"),
        ({"shared": 65537}, "65537 bytes of shared memory, of which a workgroup has 65536"),
        ({"grid": (2**24, 1, 1)}, "4294967296 threads along x, of which a launch has at most 4294967295"),
    ],
)
def test_a_launch_is_within_what_the_device_has(change: dict[str, object], fault: str) -> None:
    assert LAUNCH.fault(GFX942) == "" and LAUNCH.pack({}) == b"\xff\xff\xff\x7f\xff\xff\xff\xff"
    assert fault in replace(LAUNCH, **change).fault(GFX942)  # type: ignore[arg-type]


def test_threads_of_an_entire_launch_are_counted_where_the_target_says_so() -> None:
    assert replace(LAUNCH, grid=(2**24, 1, 1)).fault(SM90) == ""
