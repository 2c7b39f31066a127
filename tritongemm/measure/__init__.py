"""Binaries to times: evaluators, the process that works on a GPU, clocks, and the choice of a winner."""
