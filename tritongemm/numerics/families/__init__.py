"""GEMM families: one file each, a kind of problem with its operands, its reference and its tolerance.

A plug-in defines

    unsupported(problem, target) -> str | None      why the target can't run the problem
    extras(problem) -> tuple[Operand, ...]          operands beside A and B, in the order in which the epilogue applies
                                                    them; where it is not defined, the bias
    scale(problem) -> float                         standard deviation of random A and B
    inputs(problem, device, init, seed) -> Operands     random operands
    reference(problem, operands) -> Tensor          C in float64
    tolerance(problem) -> float                     largest error that is rounding
    deviation(c, exact) -> float                    the error
    outside(c, exact, limit) -> float               share of the elements beyond it

and may name DTYPE_A and DTYPE_C, the dtypes of a problem that does not say, and SHUFFLED_B, where B is in the order of
`families._shuffled`. What `extras` says is all that kernels, launches and plans need to know of an operand. A file whose
name starts with an underscore is shared by several.
"""
