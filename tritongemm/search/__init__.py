"""What to try: the space of a problem, pruned, ranked and searched."""
