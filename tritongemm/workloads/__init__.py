"""What to tune: sizes from a command line or a file."""
