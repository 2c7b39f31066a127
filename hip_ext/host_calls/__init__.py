"""Shared objects whose host code starts kernels."""
