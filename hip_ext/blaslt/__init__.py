"""cuBLASLt and hipBLASLt."""
