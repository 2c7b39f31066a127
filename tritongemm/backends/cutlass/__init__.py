"""The backend of CUTLASS, NVIDIA's library of GEMM templates in C++."""
