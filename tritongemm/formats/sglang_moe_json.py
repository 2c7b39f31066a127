"""Format: SGLang's tables of tiles for layers of experts in scaled blocks, a JSON file for each (E, N) and device.

SGLang reads them from ``configs/triton_3_6_0``, the folder of the running Triton's version, of the folder that
SGLANG_MOE_CONFIG_DIR names or of its own module:
``E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json``, with a blank where vLLM has none.
"""

import re

from tritongemm.core.problem import MAX_DIM
from tritongemm.formats._expert_tables import KINDS, ExpertTables, expert_kind, table_row

_STEPS = {"nvidia": ((MAX_DIM, table_row(64, 128, 32, 3)),), "amd": ((MAX_DIM, table_row(64, 128, 32, 2)),)}


class SglangMoeJson(ExpertTables):
    """SGLang's tables of experts."""

    title = "a table of tiles of SGLang's experts, E=..,N=..,device_name=..,dtype=..,block_shape=[128, 128].json"
    server = "SGLang"
    kinds = {word: expert_kind(word.partition("_")[0], _STEPS) for word in KINDS}  # noqa: RUF012 (a constant)
    shape = ",block_shape=[{}, {}]"
    blanks = re.compile(" ")
