"""Tuned kernels at run time: `mm`, `load` and `explain`."""
