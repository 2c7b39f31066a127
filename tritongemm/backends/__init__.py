"""Opponents in the race: one file each."""
