"""What a GEMM means: families, layouts of weights and scales, references, tolerances and verification."""
