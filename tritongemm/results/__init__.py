"""What is known so far, kept on disk: the journal and the results file."""
