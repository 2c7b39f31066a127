"""Wraps what every package needs of the operating system: files, locks, temporary folders, settings, import paths."""
