"""Calls functions of shared objects whose host code starts kernels."""
