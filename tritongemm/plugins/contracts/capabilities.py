"""The capabilities that a backend declares, and the files that a compile may need beside the config."""

from dataclasses import dataclass
from pathlib import Path

from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target


@dataclass(frozen=True)
class Capabilities:
    """The problems that a backend's kernels can compute at all; an empty tuple of architectures means all."""

    archs: tuple[str, ...] = ()  # names of the targets
    kinds: tuple[str, ...] = ("one",)  # values of `Problem.kind`
    orders_b: tuple[str, ...] = (PLAIN,)  # memory layouts of B
    scales: tuple[str, ...] = ()  # where its kernels can apply scale factors: `epilogue`, `mainloop`
    tensor_scales: bool = False  # whether their epilogue accepts one factor for all of A, and for all of B
    epilogues: tuple[str, ...] = ("none",)  # what they can do with a complete sum, of `core.epilogues.EPILOGUES`

    def supports(self, problem: Problem, target: Target) -> Support:
        """Say whether these kernels compute problems of this kind."""
        if self.archs and target.name not in self.archs:
            return Support(f"its kernels are for {' and '.join(self.archs)}, not {target.name}")
        if problem.kind not in self.kinds:
            kinds = " and ".join("single" if kind == "one" else kind for kind in self.kinds)
            return Support(f"it computes {kinds} products, not {problem.kind} ones")
        if problem.b.order not in self.orders_b:
            return Support(f"it reads B in the order {' or '.join(self.orders_b)}, not {problem.b.order}")
        if problem.epilogue not in self.epilogues:
            return Support(f"its kernels store a product as it is, without {problem.epilogue}")
        for spec in problem.extras:
            if spec.scaling is not None and spec.applied not in self.scales:
                return Support(f"its kernels can't apply {spec.name} in the {spec.applied}")
            if spec.single and not self.tensor_scales:
                return Support(f"its kernels take a {spec.name} for each row, not one for all")
        return SUPPORTED


@dataclass(frozen=True)
class BuildInputs:
    """Files that compiling may need beside the config."""

    manifests: tuple[Path, ...] = ()  # files that list kernels; empty for those that the environment names


NO_INPUTS = BuildInputs()
