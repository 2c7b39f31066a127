"""Prepares, captures and patches launches on a device."""
