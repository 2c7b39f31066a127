"""The class `StridePlaces`: the launch parameters that are operand strides, for operands that are not contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tritongemm.core.launch import Launch
from tritongemm.core.support import Support


@dataclass(frozen=True)
class StridePlaces:
    """The parameters of a launch that are strides.

    Attributes:
        most_lead: the most elements from one stored row of an operand to the next.
        places: by ``stride_`` or ``batch_`` and an operand's name, the index of the parameter that tells how far its
            rows, or its products, are apart, and what that was compiled to be a multiple of.
    """

    most_lead: int
    places: Mapping[str, tuple[int, int]]

    def move(self, launch: Launch, strides: Mapping[str, tuple[int, int]]) -> Launch | Support:
        """The launch on operands that lie otherwise, or why its binary can't read them.

        Args:
            launch: on dense operands.
            strides: by an operand's name, elements from one stored row to the next and from one product to the next.
        """
        params = list(launch.params)
        for operand, (lead, apart) in strides.items():
            if lead > self.most_lead:
                return Support(f"rows of {operand} {lead} elements apart are beyond the 32 bits of offsets in a tile")
            for name, value in ((f"stride_{operand}", lead), (f"batch_{operand}", apart)):
                if name not in self.places:
                    continue
                index, divisor = self.places[name]
                if value % divisor:
                    return Support(f"{name} of {value} is no multiple of {divisor}, as the kernel was compiled for")
                params[index] = replace(params[index], value=value)
        return replace(launch, params=tuple(params))
