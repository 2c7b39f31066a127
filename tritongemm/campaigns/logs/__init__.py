"""Logs of libraries: a file for each kind of line that names a product."""
