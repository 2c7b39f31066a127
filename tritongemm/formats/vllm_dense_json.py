"""Format: vLLM's tables of tiles for block-scaled fp8 and int8, a JSON file for each (N, K) and device.

vLLM reads them from the folder ``configs`` of its module ``quantization.utils``, by their names:
``N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json``.
"""

import re

from tritongemm.formats._tile_rows import DIVISORS, Kind
from tritongemm.formats._tile_tables import TileTables

_DEFAULT = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 4, "num_stages": 2,
}  # fmt: skip
_DEPTHS = {"nvidia": DIVISORS, "amd": DIVISORS}


class VllmDenseJson(TileTables):
    """vLLM's tables of block-scaled products."""

    title = "a table of tiles of vLLM, N=..,K=..,device_name=..,dtype=..,block_shape=[128,128].json"
    server = "vLLM"
    kinds = {  # noqa: RUF012 (a constant)
        "fp8_w8a8": Kind("a8w8_blockscale", "fp8", (128, 128), _DEFAULT, depths=_DEPTHS),
        "int8_w8a8": Kind("a8w8_blockscale", "int8", (128, 128), _DEFAULT, depths=_DEPTHS),
    }
    name_of_table = re.compile(
        r"N=(?P<n>[0-9]{1,10}),K=(?P<k>[0-9]{1,10}),device_name=(?P<device>[^,]*),dtype=(?P<kind>[a-z0-9_]+),"
        r"block_shape=\[(?P<block_n>[0-9]{1,5}),(?P<block_k>[0-9]{1,5})\]\.json"
    )
    blanks = re.compile(r"[\s/]+")
    shape = ",block_shape=[{},{}]"
