"""Format: vLLM's tables of tiles for layers of experts in scaled blocks, a JSON file for each (E, N) and device.

vLLM reads them from the folder that VLLM_TUNED_CONFIG_FOLDER names, then from ``configs`` of its module ``fused_moe``:
``E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json``.
"""

import re

from tritongemm.core.problem import MAX_DIM
from tritongemm.formats._expert_tables import KINDS, ExpertTables, expert_kind, table_row

_NVIDIA = (
    (4, table_row(16, 64, 1, 4)),
    (8, table_row(16, 64, 1, 3)),
    (16, table_row(16, 128, 1, 3)),
    (64, table_row(16, 128, 32, 3)),
    (MAX_DIM, table_row(64, 128, 32, 3)),
)
_AMD = ((16, table_row(16, 128, 1, 2)), (64, table_row(16, 128, 32, 2)), (MAX_DIM, table_row(64, 128, 32, 2)))


class VllmMoeJson(ExpertTables):
    """vLLM's tables of experts."""

    title = "a table of tiles of vLLM's experts, E=..,N=..,device_name=..,dtype=..,block_shape=[128,128].json"
    server = "vLLM"
    kinds = {word: expert_kind(word.partition("_")[0], {"nvidia": _NVIDIA, "amd": _AMD}) for word in KINDS}  # noqa: RUF012 (a constant)
    shape = ",block_shape=[{},{}]"
    blanks = re.compile(r"[\s/]+")
    device_words = {"H200": "NVIDIA_H200"}  # noqa: RUF012 (a constant)
