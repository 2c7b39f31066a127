"""Defines what a GEMM computes: families, layouts of weights and scales, references, tolerances and verification."""
