"""Orders of B in memory beside row- and column-major: one file each."""
