"""The backend of assembly kernels from manifests."""
