"""Backend: instances of CUTLASS, NVIDIA's library of GEMM templates in C++."""
