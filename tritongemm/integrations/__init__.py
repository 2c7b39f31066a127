"""Plug-ins of inference servers, found by entry points: they serve what TRITONGEMM_CONFIG names, and nothing else."""
