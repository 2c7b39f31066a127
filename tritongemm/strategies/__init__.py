"""Search strategies: one file each."""
