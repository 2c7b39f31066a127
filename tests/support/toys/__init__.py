"""Plug-ins that docs/plugins shows and tests use: one file a kind."""
