"""Holds a small kernel that a compiler process compiles before its first job, which loads what all need."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tile(a_ptr, b_ptr, c_ptr, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute C = A @ B for one tile, both operands row-major and K a multiple of BLOCK."""
    rows = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * k + start + rows[None, :])
        b = tl.load(b_ptr + (start + rows[:, None]) * BLOCK + rows[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], total)
