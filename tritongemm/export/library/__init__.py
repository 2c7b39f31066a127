"""Kernel libraries: tuned kernels as code objects with a manifest, which serve without a compiler."""
