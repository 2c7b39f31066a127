"""Backend: SGLang's own Triton kernels for fp8 in blocks, which its tables of tiles set."""
