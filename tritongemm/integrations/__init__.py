"""Plug-ins of inference servers, found by entry points, which serve what TRITONGEMM_CONFIG names."""
