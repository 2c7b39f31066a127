"""Keeps what is known so far on disk: the journal and the results file."""
