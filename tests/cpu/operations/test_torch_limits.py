"""PyTorch's limits in one table: what they say, and that what serves a row of another M reads them there."""

from tests.support.products import product
from tests.support.tables import cases
from tritongemm.operations.torch_limits import serves_other_m, takes_blocks, takes_fp8, takes_groups, takes_int8


def test_sizes() -> None:
    assert takes_fp8(16, 4096) and not takes_fp8(24, 4096) and not takes_fp8(16, 4104)
    assert takes_int8(17, 24, 8) and not takes_int8(16, 24, 8) and not takes_int8(17, 20, 8)
    assert not takes_int8(17, 24, 12)
    assert takes_blocks("sm90") and not takes_blocks("sm100") and not takes_blocks("gfx942")
    assert takes_groups(32, 4096) and not takes_groups(32, 4104) and not takes_groups(8)


@cases(("int8", 17, 24, True), ("int8", 16, 24, False), ("fp8e4m3fn", 1, 48, True), ("fp8e4m3fn", 1, 24, False))
def test_a_row_of_another_m_serves_where_pytorch_has_no_such_product(dtype: str, m: int, n: int, fast: bool, /) -> None:
    assert serves_other_m(product("a8w8", m, n, 64, dtype), "sm90") is not fast
