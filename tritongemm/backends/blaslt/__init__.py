"""Backend: the vendor's GEMM library, cuBLASLt or hipBLASLt."""
