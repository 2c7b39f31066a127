"""Finds what this machine has: the target to tune for, the devices to use, and the versions that affect a result."""

from dataclasses import dataclass

from tritongemm.core.errors import TargetError
from tritongemm.core.target import Target
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.driver import Device
from tritongemm.search_spaces import loader as target_files
from tritongemm.system import settings

OFFLINE = "gfx942"


@dataclass(frozen=True)
class Machine:
    """The machine that is tuned on, or the target that is tuned for without a GPU."""

    target: Target  # facts, corrected by what the device reports
    vendor: str  # whose driver runs it; "" without a GPU
    devices: tuple[int, ...]  # ordinals; empty without a GPU
    product: str  # the device's name, or the target's
    why: str  # one line on how this was chosen


def find_machine(wanted: str | None, gpu_ids: str | None = None, ngpus: int = 0) -> Machine:
    """Return the machine to tune on, its GPU or one by name or architecture; a TargetError if that is not there."""
    facts = target_files.load_target(wanted) if wanted else None
    vendor = driver.find_vendor()
    if vendor is None:
        if gpu_ids is not None or ngpus:
            raise TargetError("--gpus, --ngpus and --mp need a GPU, and no GPU driver with a device was found")
        facts = facts or target_files.load_target(OFFLINE)
        asked = wanted not in (None, facts.name) and facts.product not in str(wanted)
        named = f"{wanted}, with the figures of {facts.product}" if asked else facts.product
        return Machine(facts, "", (), facts.product, f"no GPU here: compiling for {facts.name} ({named})")
    opened = driver.open_driver(vendor)
    count = opened.device_count()
    try:
        ids = tuple(int(i) for i in gpu_ids.split(",")) if gpu_ids else tuple(range(ngpus or 1))
    except ValueError:
        raise TargetError(f"--gpus must be whole numbers with commas between, not {gpu_ids!r}") from None
    if len(set(ids)) != len(ids) or any(not 0 <= i < count for i in ids):
        raise TargetError(f"devices {', '.join(map(str, ids))} were asked for; this machine has 0 to {count - 1}")
    device = opened.device(ids[0])
    for other in (opened.device(i) for i in ids[1:]):
        if _kind_of(other) != _kind_of(device):
            raise TargetError(
                f"devices {', '.join(map(str, ids))} are not alike ({_described(device)} and {_described(other)}), and "
                "their times can't be compared: tune on each kind by itself, with --gpus and an -o of its own"
            )
    if facts is not None and facts.name != device.arch:
        why = f"this machine's GPU is {device.arch}: compiling for {facts.name} without running"
        return Machine(facts, "", (), facts.product, why)
    seen = device.properties
    measured = {k: seen[k] for k in ("compute_units", "lds_bytes", "memory_bytes") if seen.get(k)}
    facts = target_files.load_target(device.arch, device.name, **measured)
    if facts.llc_bytes == facts.l2_bytes and seen.get("l2_bytes"):  # no cache behind the L2
        facts = target_files.load_target(
            device.arch, device.name, **measured, l2_bytes=seen["l2_bytes"], llc_bytes=seen["l2_bytes"]
        )
    others = f" x {len(ids)}" if len(ids) > 1 else ""
    return Machine(facts, vendor, ids, device.name, f"tuning on {device.name}{others} ({facts.name})")


def memory_gbps(machine: Machine) -> int:
    """Return the bandwidth of a machine's memory, in GB/s: as the first GPU's driver says, else the target's."""
    said = driver.open_driver(machine.vendor).device(machine.devices[0]).properties if machine.devices else {}
    return said.get("memory_gbps") or round(machine.target.hbm_gbps)


def count_devices() -> int:
    """Return how many GPUs this machine has."""
    vendor = driver.find_vendor()
    return 0 if vendor is None else driver.open_driver(vendor).device_count()


def _kind_of(device: Device) -> tuple[str, str, int]:
    """Return what devices must share for their times to be compared; a part of a chip has the name of the chip."""
    return device.arch, device.name, device.properties.get("compute_units", 0)


def _described(device: Device) -> str:
    return f"{device.name} of {device.properties.get('compute_units', 0)} compute units"


def toolchain(machine: Machine) -> dict[str, str]:
    """Return the versions that a result depends on, and the name of the device that measures it, where one does."""
    versions = {p: settings.version(p) for p in ("triton", "torch")}
    return {**versions, "device": machine.product} if machine.devices else versions
