"""CUPTI and rocprofiler-sdk."""
