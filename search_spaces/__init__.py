"""YAML search spaces, one per architecture."""
