"""Backend: others' products of bf16 or fp16 by int4, converted once as their users convert weights."""
