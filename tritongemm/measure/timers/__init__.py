"""The timers, one file each."""
