"""Exports what a person takes away: kernels with a manifest, and launch plans."""
