import pytest
import torch

from tests.support.nouns import Family, each, registry
from tests.support.plugins import each_with_toy
from tritongemm.plugins.contracts import ScaleLayout

TOY = "scale_layout_toy"


layout = each_with_toy(ScaleLayout, TOY)


@each("dtype", [torch.uint8, torch.float32])
@each(("rows", "groups"), [(32, 8), (64, 16), (96, 8)])
def test_unpacking_undoes_packing(layout: ScaleLayout, dtype: torch.dtype, rows: int, groups: int) -> None:
    scales = torch.randint(0, 250, (rows, groups), generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = layout.pack(scales)
    assert (packed.shape, packed.dtype, packed.is_contiguous()) == (scales.shape, dtype, True)
    assert torch.equal(layout.unpack(packed), scales) and not torch.equal(packed, scales)
    assert torch.equal(packed.flatten().sort().values, scales.flatten().sort().values)


def test_kernels_and_families_find_factors_where_packing_puts_them(layout: ScaleLayout) -> None:
    """Whatever a family names, its factors' extents can be packed and unpacked."""
    if not layout.row_place:
        pytest.skip("no kernel of ours reads this order")
    rows, groups = 2 * layout.pad[0], 3 * layout.pad[1]
    r, g = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    places = eval(f"({layout.row_place}) + ({layout.group_place})", {"r": r, "g": g, "groups": groups})
    factors = torch.arange(rows * groups).reshape(rows, groups)
    assert torch.equal(layout.pack(factors).flatten()[places], factors)
    for family in registry.every(Family):
        dtype = family.defaults.a.dtype
        for scaling in family.scalings(dtype, dtype)[0]:
            if scaling is not None and scaling.layout == layout.name:
                for rows, k in ((1, 32), (33, 512), (100, 96)):
                    extents = scaling.shape(rows, k)
                    scales = torch.arange(extents[0] * extents[1]).reshape(extents)
                    assert torch.equal(layout.unpack(layout.pack(scales)), scales)
