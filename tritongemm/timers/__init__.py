"""Clocks: one file each."""
