"""Binds the profilers that time kernels in process: CUPTI and rocprofiler-sdk."""
