"""Reads what to tune: sizes from a command line, a file, a model or a capture."""
