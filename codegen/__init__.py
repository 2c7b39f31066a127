"""Config and Problem to source text."""
