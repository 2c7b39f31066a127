"""What a kernel does with a complete sum, its scale factors and its bias before it stores them: the names of epilogues.

Gated ones (`silu_mul` and the like) store activation(gate) * up. The columns of gate and of up alternate in B by `RUN`,
so that a matrix unit leaves both in registers of one thread.
"""

RUN = 8  # columns of gate, after which as many of up follow
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
GATED = ("silu_mul", "gelu_mul", "gelu_tanh_mul")
EPILOGUES = ("none", *ACTIVATIONS, *GATED)


def activation_of(epilogue: str) -> str:
    """Return the name of an epilogue's activation; "" of one without any."""
    name = epilogue.removesuffix("_mul")
    return name if name in ACTIVATIONS else ""
