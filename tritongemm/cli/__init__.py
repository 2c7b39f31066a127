"""Command lines: arguments in, exit status out."""
