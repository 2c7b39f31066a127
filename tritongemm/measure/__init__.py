"""Measurement of binaries: evaluators, the process that works on a GPU, timers, and the choice of a winner."""
