"""The backend of the vendor's GEMM library, cuBLASLt or hipBLASLt."""
