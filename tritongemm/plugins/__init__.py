"""Plug-ins: the contract of each kind, and how they are found by file name."""
