"""Logs of libraries: a file for each kind of line that tells what a library was asked for."""
