"""Prepares and starts launches on a device, and lists what this machine has."""
