"""Execute launch plans on an emulated AMD GPU, twice each, and compare with the references of their families.

usage: run_scaled_plan.py EMULATOR CHECKOUT PLAN.json ...
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.nouns import Family, Problem, registry, verify

MOST = 2e-2  # error, in the unit of `verify.deviation`: a library's splits add up in bf16


def store(raw: Any, buffer: dict[str, Any], operand: Tensor) -> Tensor:
    """Write an operand as a plan's strides say; return what is there, which products may share."""
    memory, stored = torch.from_numpy(raw), operand if operand.stride(-1) == 1 else operand.mT
    if stored.nbytes == buffer["bytes"]:
        memory.copy_(stored.contiguous().view(torch.uint8).flatten())
        return operand
    there = memory.view(operand.dtype).as_strided(buffer["shape"], buffer["strides"])
    for place, one in zip(there, operand.reshape(buffer["shape"]), strict=True):
        place.copy_(one)
    return there.reshape(operand.shape)


def execute(device: Any, path: Path) -> str:
    """Launch a plan twice, memory operations landing as late as the code allows; return what was seen."""
    plan = json.loads(path.read_text())
    problem = Problem.from_json(plan["product"])
    family = registry.get(Family, problem.family)
    module, block = device.load((path.parent / plan["object"]).read_bytes()), bytearray.fromhex(plan["kernarg"])
    operands, held = dict(family.make_inputs(problem, "cpu")), {}
    for buffer in plan["buffers"]:
        name, raw = buffer["name"], np.full(buffer["bytes"], 0xFF if buffer["init"] == "poison" else 0, np.uint8)
        if buffer["init"] == "values":
            raw[:] = np.array(buffer["values"], np.int32).view(np.uint8)
        elif buffer["init"] == "random":
            operands[name] = store(raw, buffer, operands[name])
        held[name] = device.buffer(raw.nbytes), raw
        held[name][0].upload(raw.ctypes.data)
        struct.pack_into("<Q", block, buffer["offset"], held[name][0].ptr)
    exact, (result, start) = family.reference(problem, operands), held["c"]
    worst, races = 0.0, 0
    for _ in range(2):
        result.upload(start.ctypes.data)
        shape = tuple(plan["grid"]), tuple(plan["block"])
        races += module.launch(plan["kernel"], *shape, bytes(block), plan["dynamic_lds"], late=True).races
        found = np.zeros_like(start)
        result.download(found.ctypes.data)
        for one, _ in held.values():
            one.check()
        c = torch.from_numpy(found).view(getattr(torch, problem.c.type.torch)).reshape(problem.operands["c"].extents)
        worst = max(worst, verify.compare(problem, family, c, exact).error)
    return f"error {worst:.3g}, {'right' if worst <= MOST else 'wrong'}, races {races}"


def main() -> int:
    emulator, checkout, *plans = sys.argv[1:]
    sys.path.insert(0, emulator)
    from emu_hip import EmulatedDevice  # type: ignore[import-not-found]

    said = [execute(EmulatedDevice(checkout, json.loads(path.read_text())["arch"]), path) for path in map(Path, plans)]
    print(*said, sep="\n")
    return 0 if all(one.endswith("right, races 0") for one in said) else 1


if __name__ == "__main__":
    sys.exit(main())
