"""Binds the vendors' GEMM libraries, cuBLASLt and hipBLASLt."""
