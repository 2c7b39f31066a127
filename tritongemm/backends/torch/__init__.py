"""Backend: PyTorch's own GEMM."""
