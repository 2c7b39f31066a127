"""Logs of libraries: a file for each kind of line that says what a library was asked for."""
