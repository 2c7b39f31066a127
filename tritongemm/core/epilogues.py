"""What a kernel does with a complete sum, its scale factors and its bias before it stores them: the names of epilogues.

Gated ones (`silu_mul` and the like) store activation(gate) * up. The columns of gate and of up alternate in B by `RUN`,
so that a matrix unit leaves both in registers of one thread; of groups all of gate's are in front of all of up's, and a
tile has some of both. Those in blocks store fp8 with a float32 factor for each
`SCALED_BLOCK` columns of a row; the factors, [columns / SCALED_BLOCK, M], follow the rows of C in memory.
"""

from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import SCALED_BLOCK

RUN = 8  # columns of gate, after which as many of up follow
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
GATED = ("silu_mul", "gelu_mul", "gelu_tanh_mul")
IN_BLOCKS = ("block", *(f"{name}_block" for name in (*ACTIVATIONS, *GATED)))
RESIDUAL = "add"  # the sum of C and a matrix of its shape and type, which is the operand `bias`
EPILOGUES = ("none", *ACTIVATIONS, *GATED, *IN_BLOCKS, RESIDUAL)


def activation_of(epilogue: str) -> str:
    """Return the name of an epilogue's activation; "" of one without any."""
    name = epilogue.removesuffix("_block").removesuffix("_mul")
    return name if name in ACTIVATIONS else ""


def is_gated(epilogue: str) -> bool:
    """Return whether an epilogue stores a column for two of B."""
    return epilogue.removesuffix("_block") in GATED


def rows_of_factors(m: int) -> int:
    """Return how many rows of C in fp8 are as long as the factors of its blocks."""
    return cdiv(4 * m, SCALED_BLOCK)
