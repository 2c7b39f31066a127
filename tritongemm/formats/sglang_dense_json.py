"""Format: SGLang's tables of tiles for block-scaled and channel-wise fp8, a JSON file for each (N, K) and device.

SGLang reads them from the folder ``kernels/ops/gemm/configs``, by their names:
``N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json``, which has a blank where vLLM's has
none, and ``N=6144,K=4096,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json``, in which null says that SGLang's
CUTLASS kernel is to run.
"""

import re

from tritongemm.formats._tile_rows import DIVISORS, Kind
from tritongemm.formats._tile_tables import TileTables

_DEFAULT = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 4, "num_stages": 3,
}  # fmt: skip
_CHANNELS = (1, 2, 4, 8, 16, 32, 33, 48, 64, 65, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
_DEPTHS = {"nvidia": DIVISORS, "amd": (128,)}  # on ROCm SGLang raises a smaller BLOCK_SIZE_K to that of the scales


class SglangDenseJson(TileTables):
    """SGLang's tables of block-scaled and channel-wise products."""

    title = "a table of tiles of SGLang, N=..,K=..,device_name=..,dtype=..,block_shape=[128, 128].json"
    server = "SGLang"
    kinds = {  # noqa: RUF012 (a constant)
        "fp8_w8a8": Kind("a8w8_blockscale", "fp8", (128, 128), _DEFAULT, depths=_DEPTHS, more=("SPLIT_K", "SWAP_AB")),
        "int8_w8a8": Kind("a8w8_blockscale", "int8", (128, 128), _DEFAULT, depths=_DEPTHS),
        "fp8_w8a8_channelwise": Kind("a8w8", "fp8", ladder=_CHANNELS),
    }
    name_of_table = re.compile(
        r"N=(?P<n>[0-9]{1,10}),K=(?P<k>[0-9]{1,10}),device_name=(?P<device>[^,]*),dtype=(?P<kind>"
        r"fp8_w8a8_channelwise(?=\.json)|[a-z0-9]+_[a-z0-9]+(?=,))"
        r"(?:,block_shape=\[(?P<block_n>[0-9]{1,5}), (?P<block_k>[0-9]{1,5})\])?\.json"
    )
    blanks = re.compile(" ")
    shape = ",block_shape=[{}, {}]"
