"""GEMM families: one file each."""
