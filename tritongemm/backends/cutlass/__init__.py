"""Backend: CUTLASS."""
