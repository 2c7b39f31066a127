"""The binding of the vendors' GEMM libraries, cuBLASLt and hipBLASLt."""
