"""The noun `RunIdentity`: what a run and the results that it continues must share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritongemm.core.errors import OutputError
from tritongemm.core.record import SCHEMA


@dataclass(frozen=True)
class RunIdentity:
    """The target and the protocol of a run."""

    target: str  # name of its target
    toolchain: Mapping[str, str]  # versions; `device` names the GPU that it measures on
    protocol: Mapping[str, Any]  # how it measures
    compute_units: int  # of its device; 0 where that is not said
    resumed: bool  # whether it goes on from what is there, or measures anew

    def header(self) -> dict[str, Any]:
        """Return the header of a run's journal: what its trials depend on."""
        header = {"target": self.target, "toolchain": self.toolchain, "protocol": self.protocol}
        return {**header, **({"compute_units": self.compute_units} if self.compute_units else {}), "schema": SCHEMA}

    def foreign(self, target: str, toolchain: Mapping[str, str], compute_units: int) -> str:
        """Return why results of another target or device do not belong to this run's; "" where they do."""
        if target != self.target:
            return f"is for {target or 'an unnamed target'}, this run for {self.target}"
        theirs, ours = toolchain.get("device"), self.toolchain.get("device", "no GPU")
        if theirs and theirs != ours:
            return f"was measured on {theirs}, this run has {ours}"
        if compute_units and self.compute_units and compute_units != self.compute_units:
            return f"is for a device of {compute_units} compute units, this run has {self.compute_units}"
        return ""

    def require_belongs(self, what: str, target: str, toolchain: Mapping[str, str], compute_units: int) -> None:
        """Refuse to add to results of another target or device, which --no-resume would mix or replace."""
        reason = self.foreign(target, toolchain, compute_units)
        if reason:
            raise OutputError(f"{what} {reason}: choose another -o")

    def require_toolchain(self, what: str, toolchain: Mapping[str, str]) -> None:
        """Refuse to go on from results of another toolchain."""
        moved = _moved(toolchain, self.toolchain, "unknown")
        if moved and self.resumed:
            raise OutputError(
                f"{what} was made by another toolchain ({moved}): choose another -o, or measure these sizes anew with "
                "--no-resume"
            )

    def require_continues(self, what: str, header: Mapping[str, Any]) -> None:
        """Refuse to go on from a journal with this header, if its trials can't be compared with those of this run."""
        self.require_belongs(what, header["target"], header["toolchain"], header.get("compute_units", 0))
        self.require_toolchain(what, header["toolchain"])
        changed = _moved(header["protocol"], self.protocol, "None")
        if changed and self.resumed:
            raise OutputError(
                f"{what} was measured otherwise ({changed}): use the same options, another -o, or --no-resume"
            )


def _moved(theirs: Mapping[str, Any], ours: Mapping[str, Any], absent: str) -> str:
    """Return the values that differ, each with its old and new value."""
    keys = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
    return ", ".join(f"{k} {theirs.get(k, absent)} → {ours.get(k, absent)}" for k in keys)
