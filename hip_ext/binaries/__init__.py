"""Readers of compiled GPU code (ELF files, offload bundles), which need no GPU and no vendor tool."""
