"""GEMM families: one file each, a kind of problem with its scales, its inputs, its reference and its tolerance."""
