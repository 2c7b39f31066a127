"""Backend: kernels generated here and compiled by Triton."""
