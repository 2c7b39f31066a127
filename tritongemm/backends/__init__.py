"""Backends, which are the sources of GEMM kernels that race, one folder each."""
