"""Backend: PyTorch's own GEMM, the baseline of every race."""
