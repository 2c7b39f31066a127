"""Backends, the sources of GEMM kernels that race: a folder each."""
