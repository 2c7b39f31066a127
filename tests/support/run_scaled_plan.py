"""Execute launch plans whose operands have scales on an emulated AMD GPU, twice each, and compare with float64.

usage: run_scaled_plan.py EMULATOR CHECKOUT PLAN.json ...
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fill(raw: Any, buffer: dict[str, Any], rng: np.random.Generator) -> Any:
    """Random bytes of an operand, and the numbers that they are."""
    from run_plan import encode  # type: ignore[import-not-found]

    places = sum(i * s for i, s in zip(np.indices(buffer["shape"]), buffer["strides"], strict=True))
    if buffer.get("order") == "shuffled":
        k, n = np.indices(buffer["shape"])
        places = shuffled(k, n, buffer)
    if buffer["dtype"] == "fp4e2m1":  # two a byte, the earlier one in the low half
        raw[:] = rng.integers(0, 256, raw.size)
        return FP4[(raw[places // 2] >> 4 * (places % 2)) & 15]
    if buffer["dtype"] == "e8m0":  # outliers too
        raw[:] = rng.integers(117, 138, raw.size)
        return 2.0 ** (raw[places].astype(float) - 127)
    numbers = rng.standard_normal(buffer["shape"])
    if "scaling" in buffer:  # outliers, so that a factor in another's place can't pass
        numbers = numbers * 2.0 ** rng.integers(-10, 11, buffer["shape"])
    bits, values = encode(numbers, buffer["dtype"])
    item = bits.size // values.size
    raw.reshape(-1, item)[places.reshape(-1)] = bits.reshape(-1, item)
    return values


def shuffled(k: Any, n: Any, buffer: dict[str, Any]) -> Any:
    """Places of B's numbers: in blocks of 16 columns and 32 elements of storage, 16 bytes of each column in turn."""
    depth, columns = buffer["shape"]
    packed = 2 if buffer["dtype"] == "fp4e2m1" else 1
    run, block = 16 // (buffer["bytes"] * packed // (depth * columns)), 32
    unit, half = k // packed, k % packed
    within = (unit % block // run) * 16 * run + (n % 16) * run + unit % run
    return ((n // 16 * (depth // packed) * 16 + unit // block * block * 16) + within) * packed + half


def along_k(scales: Any, shape: tuple[int, ...], layout: str) -> Any:
    """One factor for each number of [..., rows, K], of powers of two in rows or shuffled.

    Shuffled, blocks of 32 rows and 8 groups hold, for each of 4 groups and 16 rows, a word with the groups 4 apart and
    the rows 16 apart.
    """
    *lead, rows, groups = scales.shape
    if layout == "rows":
        return np.repeat(scales, 32, axis=-1)[..., : shape[-2], : shape[-1]]
    group, row = np.arange(groups), np.arange(rows)[:, None]
    word = (group % 4) * 16 + row % 16
    place = (row // 32) * 32 * groups + (group // 8) * 256 + word * 4 + (group // 4 % 2) * 2 + row // 16 % 2
    return np.repeat(scales.reshape(*lead, -1)[..., place], 32, axis=-1)[..., : shape[-2], : shape[-1]]


def with_powers(values: dict[str, Any], layouts: dict[str, str]) -> dict[str, Any]:
    """The same values, A and B multiplied by their powers of two; rows of A are of all groups together."""
    scaled, rows = dict(values), values["a"]
    of_a, of_b = scaled.pop("scale_a"), scaled.pop("scale_b")
    flat = rows if of_a.ndim == rows.ndim else rows.reshape(-1, rows.shape[-1])
    scaled["a"] = (flat * along_k(of_a, flat.shape, layouts["scale_a"])).reshape(rows.shape)
    turned = values["b"].swapaxes(-1, -2)
    scaled["b"] = (turned * along_k(of_b, turned.shape, layouts["scale_b"])).swapaxes(-1, -2)
    return scaled


def spread(factors: Any, scaling: dict[str, Any], shape: tuple[int, int]) -> Any:
    """One factor for each number of [..., rows, K], of those that `rows` rows and `depth` numbers along K share."""
    by_rows = factors.swapaxes(-1, -2) if scaling["layout"] == "groups" else factors
    return np.repeat(np.repeat(by_rows, scaling["rows"], -2), scaling["depth"], -1)[..., : shape[-2], : shape[-1]]


def execute(device: Any, path: Path, late: bool) -> tuple[float, int]:
    """Largest |C - reference| / (|reference| + rms(reference)) of two launches of a plan, and the races seen."""
    plan = json.loads(path.read_text())
    module = device.load((path.parent / plan["object"]).read_bytes())
    rng, block = np.random.default_rng(0), bytearray(bytes.fromhex(plan["kernarg"]))
    host: dict[str, Any] = {}
    groups: tuple[str, list[int]] | None = None
    values: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for buffer in plan["buffers"]:
        name, raw = buffer["name"], np.zeros(buffer["bytes"], np.uint8)
        if buffer["init"] == "poison":
            raw[:] = 0xFF
        elif buffer["init"] == "values":
            groups = name, buffer["values"]
            raw[:] = np.array(buffer["values"], np.int32).view(np.uint8)
        elif buffer["init"] == "random":
            values[name] = fill(raw, buffer, rng)
        host[name], held[name] = raw, device.buffer(raw.nbytes)
        held[name].upload(raw.ctypes.data)
        struct.pack_into("<Q", block, buffer["offset"], held[name].ptr)
    about = next(b for b in plan["buffers"] if b["role"] == "c")
    if layouts := {b["name"]: b["scaling"]["layout"] for b in plan["buffers"] if b["dtype"] == "e8m0"}:
        values = with_powers(values, layouts)
    for buffer in plan["buffers"]:
        if buffer["name"] in values and "scaling" in buffer and buffer["dtype"] == "fp32":
            factors, operand = values.pop(buffer["name"]), buffer["name"][-1]
            rows = values[operand].swapaxes(-1, -2) if operand == "b" else values[operand]
            scaled = rows * spread(factors, buffer["scaling"], rows.shape)
            values[operand] = scaled.swapaxes(-1, -2) if operand == "b" else scaled
    if groups:
        return compare(device, module, plan, bytes(block), host, held, grouped(values, *groups, about["shape"]), late)
    exact = values["a"] @ values["b"]
    for name in ("scale_a", "scale_b"):
        exact = exact * values.get(name, 1)
    exact = exact + values.get("bias", 0)
    return compare(device, module, plan, bytes(block), host, held, exact, late)


def grouped(values: dict[str, Any], name: str, numbers: list[int], shape: list[int]) -> Any:
    """C of a product of groups; NaN in rows that belong to none."""
    k, count = values["a"].shape[-1], len(numbers)
    a, exact = (
        values["a"].reshape(-1, k),
        np.full((shape[0] if name == "offsets" else shape[0] * shape[1], shape[-1]), np.nan),
    )
    # Factors that change along K are in A and B already.
    of_a = values.get("scale_a", np.ones(a.shape[0])).reshape(a.shape[0], 1)
    of_b = values.get("scale_b", np.ones(count * shape[-1])).reshape(count, 1, shape[-1])
    first = 0
    for group, number in enumerate(numbers):
        rows = slice(first, number) if name == "offsets" else slice(group * shape[1], group * shape[1] + number)
        first = number
        exact[rows] = (a[rows] * of_a[rows]) @ (values["b"][group] * of_b[group])
    return exact.reshape(shape)


def compare(
    device: Any,
    module: Any,
    plan: dict[str, Any],
    block: bytes,
    host: dict[str, Any],
    held: dict[str, Any],
    exact: Any,
    late: bool,
) -> tuple[float, int]:
    """Largest error of two launches, and the races seen."""
    from run_plan import decode

    worst, races, there = 0.0, 0, ~np.isnan(exact)
    about = next(b for b in plan["buffers"] if b["role"] == "c")
    for _ in range(2):
        held["c"].upload(host["c"].ctypes.data)
        shape = tuple(plan["grid"]), tuple(plan["block"])
        result = module.launch(plan["kernel"], *shape, block, plan["dynamic_lds"], late=late)
        out = np.zeros_like(host["c"])
        held["c"].download(out.ctypes.data)
        for one in held.values():
            one.check()
        found = decode(out, about["dtype"], about["shape"]).reshape(about["shape"])[there]
        rms = np.sqrt((exact[there] ** 2).mean())
        error = np.abs(found - exact[there]) / (np.abs(exact[there]) + rms)
        worst, races = max(worst, float(np.nan_to_num(error, nan=np.inf).max())), races + result.races
    return worst, races


def main() -> int:
    emulator, checkout, *plans = sys.argv[1:]
    sys.path.insert(0, emulator)
    from emu_hip import EmulatedDevice  # type: ignore[import-not-found]

    wrong = 0
    for path in map(Path, plans):
        device = EmulatedDevice(checkout, json.loads(path.read_text())["arch"])
        error, races = execute(device, path, late=True)
        print(f"{path}: error {error:.3g}, races {races}")
        wrong += error > 2e-2 or races > 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
