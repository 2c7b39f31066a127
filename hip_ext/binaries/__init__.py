"""Code objects read as bytes."""
