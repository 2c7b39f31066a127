"""Backend: assembly kernels from manifests."""
