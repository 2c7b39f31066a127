"""Execute launch plans whose operands have scales on an emulated AMD GPU, twice each, and compare with float64.

usage: run_scaled_plan.py EMULATOR CHECKOUT PLAN.json ...
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np


def execute(device: Any, path: Path, late: bool) -> tuple[float, int]:
    """Largest |C - reference| / (|reference| + rms(reference)) of two launches of a plan, and the races seen."""
    from run_plan import decode, encode

    plan = json.loads(path.read_text())
    module = device.load((path.parent / plan["object"]).read_bytes())
    rng, block = np.random.default_rng(0), bytearray(bytes.fromhex(plan["kernarg"]))
    host: dict[str, Any] = {}
    values: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for buffer in plan["buffers"]:
        name, raw = buffer["name"], np.zeros(buffer["bytes"], np.uint8)
        if buffer["init"] == "poison":
            raw[:] = 0xFF
        elif buffer["init"] == "random":
            bits, values[name] = encode(rng.standard_normal(buffer["shape"]), buffer["dtype"])
            item = bits.size // values[name].size
            steps = zip(np.indices(buffer["shape"]), buffer["strides"], strict=True)
            raw.reshape(-1, item)[sum(i * s for i, s in steps).reshape(-1)] = bits.reshape(-1, item)
        host[name], held[name] = raw, device.buffer(raw.nbytes)
        held[name].upload(raw.ctypes.data)
        struct.pack_into("<Q", block, buffer["offset"], held[name].ptr)
    exact = values["a"] @ values["b"]
    for name in ("scale_a", "scale_b"):
        exact = exact * values.get(name, 1)
    exact = exact + values.get("bias", 0)
    worst, races = 0.0, 0
    about = next(b for b in plan["buffers"] if b["role"] == "c")
    for _ in range(2):
        held["c"].upload(host["c"].ctypes.data)
        shape = tuple(plan["grid"]), tuple(plan["block"])
        result = module.launch(plan["kernel"], *shape, bytes(block), plan["dynamic_lds"], late=late)
        out = np.zeros_like(host["c"])
        held["c"].download(out.ctypes.data)
        for one in held.values():
            one.check()
        found = decode(out, about["dtype"], about["shape"]).reshape(about["shape"])
        rms = np.sqrt((exact**2).mean())
        error = np.abs(found - exact) / (np.abs(exact) + rms)
        worst, races = max(worst, float(np.nan_to_num(error, nan=np.inf).max())), races + result.races
    return worst, races


def main() -> int:
    emulator, checkout, *plans = sys.argv[1:]
    sys.path.insert(0, emulator)
    from emu_hip import EmulatedDevice

    wrong = 0
    for path in map(Path, plans):
        device = EmulatedDevice(checkout, json.loads(path.read_text())["arch"])
        error, races = execute(device, path, late=True)
        print(f"{path}: error {error:.3g}, races {races}")
        wrong += error > 2e-2 or races > 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
