"""Configs to binaries: compiler processes and the cache that they fill."""
