"""The second step of a product in blocks on a GPU: an activation, or gate and up, quantised at the rate of memory.

`torch.compile`'s kernel of the same formulas has a fifth of that rate, and would be no competitor.
"""

from typing import Any

from tritongemm.codegen.modules import run_text
from tritongemm.codegen.template_facts import TEMPLATES
from tritongemm.core.epilogues import ACTIVATIONS, activation_of, is_gated
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Tensor
from tritongemm.core.scaling import SCALED_BLOCK

_ROWS = 8  # of a program, each with the columns of one factor


def quantise(epilogue: str, run: int, made: Tensor, rows: Any, factors: Any, added: Any = None) -> None:
    """Write the numbers [M, N] and factors [N / 128, M] of what an epilogue in blocks makes of a product.

    Columns of gate and of up alternate by `run`.
    """
    import torch

    (m, n), name = rows.shape, activation_of(epilogue)
    constants = {"MAXIMUM": torch.finfo(rows.dtype).max, "ACT": ACTIVATIONS.index(name) if name else -1}
    constants |= {"APART": run if is_gated(epilogue) else 0, "ROWS": _ROWS, "COLS": SCALED_BLOCK}
    text = (TEMPLATES / "helpers" / "quantised_step.j2").read_text(encoding="utf-8")
    kernel = run_text(text, "quantised_step").quantise_columns
    kernel[cdiv(m, _ROWS), n // SCALED_BLOCK](made, rows, factors, m, n, **constants)
