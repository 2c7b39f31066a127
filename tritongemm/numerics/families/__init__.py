"""GEMM families, one file each: a kind of problem with its scales, inputs, reference and tolerance."""
