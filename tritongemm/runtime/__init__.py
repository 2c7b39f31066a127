"""Launches made ready on a device and started there, and what this machine has."""
